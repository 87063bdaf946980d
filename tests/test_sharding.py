"""Meshes of eight devices: every check of mesh_checks.py, run in one other process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .mesh_checks import CHECKS


@pytest.fixture(scope="module")
def results():
    done = subprocess.run(
        [sys.executable, "-m", "tests.mesh_checks"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_devices(results, name):
    assert results[name] is None, results[name]
