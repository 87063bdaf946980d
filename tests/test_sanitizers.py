"""The native code under sanitizers, and a short seeded run of every fuzz target: ``tools/sanitize.sh``.

A report ends a program with an error, and with it the script.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"


def sanitize(step: str) -> str:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    done = subprocess.run(
        ["bash", ROOT / "tools" / "sanitize.sh", step],
        env={**os.environ, "PYTHON": os.path.relpath(sys.executable, ROOT)},  # as .venv/bin/python is
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    if done.returncode == 77:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-10000:]
    return done.stdout


def test_no_instruction_set_has_memory_or_arithmetic_faults():
    lines = sanitize("address").splitlines()
    sets = [line.split(":")[0] for line in lines if line.endswith(" 0 differences")]
    assert sets[-1] == "portable"


def test_fuzz_targets_run_their_corpus_and_find_nothing_new():
    report = sanitize("fuzz")
    for target in ("handlers", "kernels", "pack"):
        kept = len(list((CORPUS / target).iterdir()))
        runs = int(report.split(f"fuzz_{target}: Done ")[1].split()[0])
        assert 0 < kept <= runs


def test_threads_have_no_data_races():
    assert "native_threads: 0 failures" in sanitize("thread")
