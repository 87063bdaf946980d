"""Code in the documentation runs."""

import doctest
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import jax_w4a8

README = Path(__file__).parent.parent / "README.md"


def _python_blocks(page: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_readme_layer_runs():
    namespace: dict = {}
    exec(_python_blocks()[0], namespace)
    assert namespace["y"].shape == (10, 256)
    assert namespace["y"].dtype == jnp.bfloat16
    assert bool(jnp.isfinite(namespace["y"]).all())


def test_readme_model_runs():
    models = pytest.importorskip("jax_w4a8.models")
    block = _python_blocks()[1].replace("path/to/checkpoint", str(models.default_model_path()))
    namespace: dict = {}
    exec(block, namespace)
    assert namespace["logits"].shape == (1, 3, 2048)
    assert namespace["ids"].shape[0] == 1


def test_packing_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("jax_w4a8.models")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in _python_blocks(README.parent / "docs" / "packing.md"):
        exec(block, namespace)
    assert len(list((tmp_path / "packed-cache").iterdir())) == 1


def test_package_example_runs():
    assert doctest.testmod(jax_w4a8).attempted > 0
    assert doctest.testmod(jax_w4a8).failed == 0
