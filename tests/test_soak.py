"""A quarter of a minute of what benchmarks/soak.py does for an hour, and some of benchmarks/recompile.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import jax_w4a8 as w4a8

from .reference import ROOT

pytestmark = [
    pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc"),
]


def run_script(name: str, *arguments: str) -> dict:
    command = [sys.executable, f"benchmarks/{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout[done.stdout.index("{") :])


def test_layers_from_several_threads_while_settings_change():
    """Results keep their bits, memory stays flat and working memory within its bound, or the script fails."""
    found = run_script("soak.py", "--minutes", "0.25", "--mode", "layer", "--requests", "6", "--seed", "1")
    assert found["faults"] == []
    assert found["requests"] > 3 * found["different_requests"]
    assert found["changes_of_settings"] > 5
    assert 0 < found["most_scratch_mib"] < found["scratch_bound_mib"]


def test_the_soak_notices_a_changed_result(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    soak = pytest.importorskip("soak")
    results = iter(range(100))
    request = soak.Request("counting", 1, 1 << 20, lambda: [next(results)])
    run = soak.Soak([request], threads=1, seed=0)
    run.run(seconds=5)
    assert "result 2, of counting, differs from its first" in run.faults[0]


def test_recompiling_for_new_shapes():
    found = run_script("recompile.py", "--compiles", "24", "--every", "8", "--part", "layer")
    assert found["compiles"] >= 24
    assert found["changed_results"] == 0
    assert 0 < found["scratch_bytes"] < 1 << 20
