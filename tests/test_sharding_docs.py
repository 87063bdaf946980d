"""The code of docs/sharding.md runs, on eight devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax_w4a8.models")

PAGE = Path(__file__).parent.parent / "docs" / "sharding.md"


def test_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) > 5
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
