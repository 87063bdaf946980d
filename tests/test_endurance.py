"""What trials of hours record: how a record begins, what tools/fuzz.py keeps, the page about them."""

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys

import pytest

from jax_w4a8.bench.machine import Machine

from .reference import ROOT

HEAD = {
    "command": "python a.py --minutes 2",
    "date": "2030-01-02",
    "revision": "0123abc",
    "machine": {"cpu": "A CPU", "memory_gib": 3.5, "threads": 2, "jax": "9.8.7"},
}
SOAK = {
    "seconds": 120,
    "threads": 3,
    "requests": 12345,
    "tokens": 6789012,
    "changes_of_settings": 1011,
    "different_results": 4,
    "resident": {"growth_mib": 5.26, "allocated_growth_mib": -0.54},
    "growth_bound_mib": 32,
    "allocated_bound_mib": 16,
    "most_scratch_mib": 7.25,
    "scratch_bound_mib": 99.5,
    "faults": ["a result differs"],
}
RECOMPILE = {
    "layer": {
        "compiles": 1000,
        "seconds": 90,
        "bytes_per_compile": 1200.4,
        "changed_results": 5,
        "scratch_bytes": 4096,
    },
    "control": {"compiles": 250, "seconds": 30, "bytes_per_compile": 3100.2},
    "leak_bound_bytes": 512,
    "scratch_bound_bytes": 1048576,
    "faults": [],
}
CHAT = {"name": "chat", "inputs": 54321, "minutes": 2.04, "cpu_minutes": 1.5, "exit_code": 0, "faults": []}
FUZZ = {"targets": [CHAT], "faults": []}
#: What libFuzzer prints; progress, its last line, statistics.
PROGRESS = "INFO: Seed: 7\n#2\tINITED cov: 3\n#4096\tpulse  cov: 51\nrun #9 of a target\n"
DONE = PROGRESS + "Done 5000 runs in 3 second(s)\n"
STATISTICS = DONE + "stat::number_of_executed_units: 5001\nstat::peak_rss_mb: 50\n"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of benchmarks/ or tools/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_record_begins_with_its_circumstances(script, tmp_path, monkeypatch):
    verdict = script("verdict")
    words = [
        str(ROOT / "benchmarks" / "soak.py"),
        "--minutes",
        "3",
        "--json",
        "/some/file",
        "--mode",
        "layer",
    ]
    monkeypatch.setattr(sys, "argv", words)
    path = tmp_path / "new" / "record.json"
    assert verdict.report(verdict.circumstances(), {"seconds": 1, "faults": []}, path) == 0
    record = json.loads(path.read_text())
    assert list(record) == ["command", "date", "revision", "machine", "seconds", "faults"]
    assert record["command"] == "python benchmarks/soak.py --minutes 3 --mode layer"
    assert record["machine"] == Machine.here().as_dict()
    assert verdict.report({}, {"faults": ["one"]}, None) == 1


def test_a_command_names_no_place_of_this_machine(script):
    command = script("verdict").command
    words = [
        "/elsewhere/run.py",
        "chat",
        "--json=/some/file",
        "--found",
        "/some/folder",
        "--jobs",
        "2",
        "--json",
    ]
    assert command(words) == "python run.py chat --jobs 2"


def test_a_revision_says_whether_files_differ(script, tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    revision = script("verdict").revision
    assert revision(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert revision(tmp_path) is None
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=one")
    git(tmp_path, "tag", "--annotate", "v1", "--message=one")
    (tmp_path / "untracked").write_text("")
    short = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert revision(tmp_path) == short
    (tmp_path / "file").write_text("two")
    assert revision(tmp_path) == f"{short}-dirty"
    (tmp_path / "inside").mkdir()
    assert revision(tmp_path / "inside") is None


@pytest.mark.parametrize(("log", "count"), [(STATISTICS, 5001), (DONE, 5000), (PROGRESS, 4096), ("", 0)])
def test_inputs_are_counted_by_the_best_that_a_log_has(script, log, count):
    assert script("fuzz").inputs(log) == count


def test_faults_are_those_of_this_run(script, tmp_path):
    """What an earlier run left is an input like others."""
    fuzz = script("fuzz")
    for name, fault in (("pack", "pack-crash-1"), ("chat", "chat/faults/KeyError-chat-3")):
        target = fuzz.Target(name, tmp_path)
        target.prepare()
        assert target.faults() == []
        for other in ("kernels-crash-1", f"{name}/crash-2", f"{name}.log", f"{name}-slow-unit-1"):
            (tmp_path / other).write_text("other")
        (tmp_path / fault).parent.mkdir(exist_ok=True)
        (tmp_path / fault).write_text("fault")
        assert target.faults() == [tmp_path / fault]
        target.prepare()
        assert target.faults() == []
        assert (target.corpus / fault.split("/")[-1]).read_text() == "fault"


def test_a_target_that_dies_is_a_fault(script, tmp_path):
    """Stands in for a native target: one that says what it ran, and one that leaves a crash and dies."""
    fuzz = script("fuzz")
    for name, ending in (
        ("pack", ""),
        ("kernels", "echo x > $prefix'crash-1'; kill -9 $$"),
        ("handlers", "exit 3"),
    ):
        program = tmp_path / f"fuzz_{name}"
        find = 'for word; do case $word in -artifact_prefix=*) prefix="${word#*=}";; esac; done'
        program.write_text(f"#!/bin/sh\n{find}\necho 'Done 12 runs in 1 second(s)' >&2\n{ending}\n")
        program.chmod(0o700)
    targets = [fuzz.Target(name, tmp_path / "found") for name in ("pack", "kernels", "handlers")]
    results = {result["name"]: result for result in fuzz.run(targets, 2, 1, tmp_path)}
    assert [result["inputs"] for result in results.values()] == [12, 12, 12]
    assert {name: result["exit_code"] for name, result in results.items()} == {
        "pack": 0,
        "kernels": -9,
        "handlers": 3,
    }
    assert fuzz.faults(results["pack"]) == []
    assert fuzz.faults(results["kernels"]) == ["kernels: kernels-crash-1"]
    assert fuzz.faults(results["handlers"]) == ["handlers: ended with exit code 3, see handlers.log"]
    assert "no faults" in fuzz.line(results["pack"])


def test_no_child_outlives_an_interrupt(script, tmp_path, monkeypatch):
    fuzz, started = script("fuzz"), []
    start = fuzz.start
    monkeypatch.setattr(fuzz, "start", lambda *words: started.append(start(*words)) or started[-1])
    for name, ending in (("pack", "exit 0"), ("kernels", "exec sleep 600")):
        (tmp_path / f"fuzz_{name}").write_text(f"#!/bin/sh\n{ending}\n")
        (tmp_path / f"fuzz_{name}").chmod(0o700)
    targets = [fuzz.Target(name, tmp_path / "found") for name in ("kernels", "pack")]
    results = fuzz.run(targets, 2, 1, tmp_path)
    assert next(results)["name"] == "pack"
    assert [running.process.returncode for running in started] == [None, 0]
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)
    assert [running.process.returncode for running in started] == [-9, 0]


def test_targets_are_those_that_there_are(script):
    fuzz = script("fuzz")
    from .fuzz.targets import TARGETS

    assert set(fuzz.PYTHON) == set(TARGETS)
    assert {f"fuzz_{name}.cc" for name in fuzz.NATIVE} == {
        path.name for path in (ROOT / "tests" / "fuzz").glob("fuzz_*.cc")
    }


def test_a_python_target_is_fuzzed(tmp_path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("needs atheris")
    file = tmp_path / "fuzz.json"
    words = [
        sys.executable,
        "tools/fuzz.py",
        "chat",
        "--minutes",
        "0.05",
        "--found",
        tmp_path,
        "--json",
        file,
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["command"] == "python tools/fuzz.py chat --minutes 0.05"
    (target,) = record["targets"]
    assert target["inputs"] > 10
    assert target["cpu_minutes"] > 0
    assert done.stdout.startswith(f"chat: {target['inputs']:,} inputs")


def test_figures_of_long_runs_are_written_from_records(script, tmp_path):
    endurance, summary = script("endurance"), script("summary")
    page = tmp_path / "page.md"
    before = f"Before\n\n{summary.BEGIN}\n\nold\n\n{summary.END}\n\nAfter\n"
    page.write_text(before)
    endurance.write_long_runs(page, tmp_path)
    assert page.read_text() == before
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "soak.json").write_text(json.dumps({**HEAD, **SOAK}))
    (tmp_path / "long" / "fuzz.json").write_text(json.dumps({**HEAD, **FUZZ, "revision": None}))
    endurance.write_long_runs(page, tmp_path)
    text = page.read_text()
    assert text.startswith(
        f"Before\n\n{summary.BEGIN}\n\n`python a.py --minutes 2`, 2030-01-02: A CPU, 3.5 GiB, "
    )
    assert text.endswith(f"\n\n{summary.END}\n\nAfter\n")
    assert "old" not in text
    assert "2 threads, jax 9.8.7, revision `0123abc`.\n\n| soak.py |" in text
    assert "2 threads, jax 9.8.7.\n\n| fuzz.py, target |" in text
    for row in (
        "| minutes | 2 |  |",
        "| threads that make requests | 3 |  |",
        "| requests | 12,345 |  |",
        "| their tokens | 6,789,012 |  |",
        "| changes of settings | 1,011 |  |",
        "| results that differed | 4 | 0 |",
        "| growth of resident memory, MiB | 5.3 | 32 |",
        "| growth of allocated memory, MiB | -0.5 | 16 |",
        "| `chat` | 54,321 | 2.0 | 1.5 | 0 |",
    ):
        assert f"\n{row}\n" in text
    assert "\n\nFault: a result differs\n" in text
    assert "recompile.py" not in text


def test_figures_of_recompilations(script, tmp_path):
    endurance, summary = script("endurance"), script("summary")
    page = tmp_path / "page.md"
    page.write_text(f"{summary.BEGIN}{summary.END}")
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "recompile.json").write_text(json.dumps({**HEAD, **RECOMPILE}))
    endurance.write_long_runs(page, tmp_path)
    for row in (
        "| compilations | 1,000 | 250 |  |",
        "| minutes | 1.5 | 0.5 |  |",
        "| bytes that each leaves | 1,200 | 3,100 | 3,612 |",  # as many as the control's, and the bound
        "| changed results | 5 |  | 0 |",
        "| working memory kept, bytes | 4,096 |  | 1,048,576 |",
    ):
        assert f"\n{row}\n" in page.read_text()


def test_the_page_has_its_marks(script):
    record, summary = script("record"), script("summary")
    text = record.LONG_RUNS.read_text()
    assert text.index(summary.BEGIN) < text.index(summary.END)
