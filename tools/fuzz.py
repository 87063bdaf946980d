"""Fuzzes for as long as one likes, several targets at once, and records what was run and found.

    python tools/fuzz.py                          # every target, an hour each
    python tools/fuzz.py handlers gguf --minutes 5 --json fuzz.json

Native targets are libFuzzer programs, which tools/sanitize.sh builds (Clang); Python's need atheris:
pip install -e '.[fuzz]'. For each target the folder of what is found gets TARGET.log, the inputs that reach
something new in TARGET/, which later runs start from too, and inputs that are faults: TARGET-KIND-HASH of
native targets, TARGET/faults/PLACE of Python's.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from verdict import ROOT, circumstances, report

NATIVE = ("handlers", "kernels", "pack")
#: Those of tests/fuzz/targets.py, which takes seconds to import.
PYTHON = ("directory", "gguf", "packed", "tokenizer", "chat")
#: What libFuzzer calls an input that is a fault.
KINDS = ("crash", "leak", "oom", "timeout")
#: Seconds after which an input is reported as a hang: many, since the machine may be busy or paused.
HANG_SECONDS = 1200


@dataclasses.dataclass(frozen=True)
class Target:
    """One target and its part of the folder of what is found."""

    name: str
    found: Path

    @property
    def corpus(self) -> Path:
        """The folder of its inputs."""
        return self.found / self.name

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.found / f"{self.name}.log"

    def faults(self) -> list[Path]:
        """Inputs that are faults."""
        if self.name in PYTHON:
            return sorted((self.corpus / "faults").glob("*"))
        return sorted(path for kind in KINDS for path in self.found.glob(f"{self.name}-{kind}-*"))

    def prepare(self) -> None:
        """Makes what an earlier run found an input like others: while it is a fault it is found again."""
        self.corpus.mkdir(parents=True, exist_ok=True)
        for fault in self.faults():
            fault.rename(self.corpus / fault.name)

    def command(self, seconds: int, programs: Path | None) -> list[str]:
        """What runs it for so long; ``programs`` is where native targets are."""
        options = [f"-timeout={HANG_SECONDS}", f"-report_slow_units={HANG_SECONDS}"]
        options += [f"-max_total_time={seconds}", "-print_final_stats=1"]
        if programs is None:
            return [sys.executable, "-m", "tests.fuzz", self.name, str(self.corpus), *options]
        options += ["-max_len=128", "-len_control=0", f"-artifact_prefix={self.found}/{self.name}-"]
        kept = ROOT / "tests" / "fuzz" / "corpus" / self.name
        return [str(programs / f"fuzz_{self.name}"), *options, str(self.corpus), str(kept)]


@dataclasses.dataclass(frozen=True)
class Running:
    """A target that was started."""

    target: Target
    process: subprocess.Popen[bytes]
    since: float

    def result(self, status: int, cpu_seconds: float) -> dict[str, Any]:
        """What it did, now that it has ended."""
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return {
            "name": self.target.name,
            "inputs": inputs(self.target.log.read_text(errors="replace")),
            "minutes": round((time.monotonic() - self.since) / 60, 2),
            "cpu_minutes": round(cpu_seconds / 60, 2),
            "exit_code": self.process.returncode,
            "faults": [path.name for path in self.target.faults()],
        }


def inputs(log: str) -> int:
    """How many inputs libFuzzer ran: by its last word or, if it was killed, its last line of progress."""
    for pattern in (r"^stat::number_of_executed_units:\s*(\d+)", r"^Done (\d+) runs", r"^#(\d+)\s"):
        counts = re.findall(pattern, log, re.MULTILINE)
        if counts:
            return int(counts[-1])
    return 0


def build() -> Path:
    """Builds the native targets; returns the folder of the programs."""
    done = subprocess.run(
        ["bash", "tools/sanitize.sh", "fuzz"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "FUZZ_SECONDS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nbash tools/sanitize.sh fuzz: exit code {done.returncode}")
    compiler = Path(done.stdout.splitlines()[0].removeprefix("== fuzz (").removesuffix(")")).name
    if "clang" not in compiler:
        sys.exit(f"native targets need Clang, which has libFuzzer; {compiler} was found (CXX names another)")
    return ROOT / "build" / "sanitize" / compiler / "address"


def start(target: Target, seconds: int, programs: Path | None) -> Running:
    """Starts a target; what it prints goes to its log."""
    target.prepare()
    # Not the default of every Clang; tools/sanitize.sh asks for it too.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1"}
    environment["UBSAN_OPTIONS"] = "print_stacktrace=1"
    command = target.command(seconds, None if target.name in PYTHON else programs)
    with target.log.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return Running(target, process, time.monotonic())


def run(
    targets: Sequence[Target], jobs: int, seconds: int, programs: Path | None
) -> Iterator[dict[str, Any]]:
    """Runs targets, so many at once; yields the result of each as it ends. No child outlives it."""
    waiting, running = list(targets), dict[int, Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                begun = start(waiting.pop(0), seconds, programs)
                running[begun.process.pid] = begun
            # Unlike Popen.wait it tells the processor time of this child alone.
            pid, status, usage = os.wait4(-1, 0)
            if pid in running:
                yield running.pop(pid).result(status, usage.ru_utime + usage.ru_stime)
    finally:
        for left in running.values():
            left.process.kill()
            left.process.wait()


def faults(result: dict[str, Any]) -> list[str]:
    """What was wrong with a target, in words."""
    name, code = result["name"], result["exit_code"]
    words = [f"{name}: {fault}" for fault in result["faults"]]
    if code and not words:
        words.append(f"{name}: ended with exit code {code}, see {name}.log")
    return words


def line(result: dict[str, Any]) -> str:
    """A target's result for people."""
    return (
        f"{result['name']}: {result['inputs']:,} inputs, {result['minutes']} minutes by the clock, "
        f"{result['cpu_minutes']} of CPU, {'; '.join(faults(result)) or 'no faults'}"
    )


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    every = (*NATIVE, *PYTHON)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(every)}; default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at once")
    parser.add_argument("--json", type=Path, help="write what happened here too")
    parser.add_argument("--found", type=Path, default=ROOT / "build" / "fuzz", help="folder of what is found")
    found = parser.parse_args()
    found.targets = list(dict.fromkeys(found.targets)) or list(every)
    unknown = [name for name in found.targets if name not in every]
    if unknown:
        parser.error(f"TARGET must be one of {', '.join(every)}, got {', '.join(unknown)}")
    if found.minutes <= 0 or found.jobs < 1:
        parser.error("--minutes and --jobs must be positive")
    needing = [name for name in found.targets if name in PYTHON]
    if needing and importlib.util.find_spec("atheris") is None:
        parser.error(f"{', '.join(needing)}: the atheris package is missing: pip install -e '.[fuzz]'")
    return found


def main() -> int:
    """Returns 1 if there are faults or a target ended as it shouldn't."""
    asked = arguments()
    head = circumstances()
    programs = build() if set(asked.targets) & set(NATIVE) else None
    targets = [Target(name, asked.found.resolve()) for name in asked.targets]
    results = []
    for result in run(targets, asked.jobs, max(1, round(60 * asked.minutes)), programs):
        print(line(result), flush=True)
        results.append(result)
    results.sort(key=lambda result: asked.targets.index(result["name"]))
    wrong = [fault for result in results for fault in faults(result)]
    return report(head, {"targets": results, "faults": wrong}, asked.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
