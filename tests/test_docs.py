"""Code in the documentation runs."""

import doctest
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import jax_w4a8

README = Path(__file__).parent.parent / "README.md"


def _python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


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


def test_package_example_runs():
    assert doctest.testmod(jax_w4a8).attempted > 0
    assert doctest.testmod(jax_w4a8).failed == 0


def test_generation_page_runs(capsys):
    pytest.importorskip("tokenizers")
    page = (README.parent / "docs" / "generation.md").read_text()
    namespace: dict = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), namespace)
    assert namespace["ids"].shape == (1, 4)
    assert len(namespace["texts"]) == 2
    assert 1 < namespace["exact"].perplexity < 2048
    assert "." not in capsys.readouterr().out.split("\n")[0]
