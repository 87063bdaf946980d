"""Code in the documentation runs, notebooks and their texts agree, pictures are up to date."""

import doctest
import json
import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_w4a8

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
#: What a page's code needs beside the package.
NEEDS = {"flax": ("flax", "orbax.checkpoint", "qwix"), "quickstart": ("flax",), "sharp-bits": ("flax",)}


def _blocks(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def test_readme_layer_runs():
    namespace: dict = {}
    exec(_blocks(README)[0], namespace)
    assert namespace["y"].shape == (10, 256)
    assert namespace["y"].dtype == jnp.bfloat16
    assert bool(jnp.isfinite(namespace["y"]).all())


def test_readme_model_runs():
    models = pytest.importorskip("jax_w4a8.models")
    block = _blocks(README)[1].replace("path/to/checkpoint", str(models.default_model_path()))
    namespace: dict = {}
    exec(block, namespace)
    assert namespace["logits"].shape == (1, 3, 2048)
    assert namespace["ids"].shape[0] == 1


def test_package_example_runs():
    assert doctest.testmod(jax_w4a8).attempted > 0
    assert doctest.testmod(jax_w4a8).failed == 0


def test_examples_in_docstrings_run():
    nnx = pytest.importorskip("flax.nnx")
    from jax_w4a8.nnx import quantizing

    results = doctest.testmod(quantizing, extraglobs={"nnx": nnx})
    assert results.attempted > 0
    assert results.failed == 0


def test_qwix_example_runs():
    qwix = pytest.importorskip("qwix")
    from jax_w4a8 import qwix as interop

    results = doctest.testmod(interop, extraglobs={"qwix": qwix, "jax": jax})
    assert results.attempted > 0
    assert results.failed == 0


def _tested_here(page: Path) -> bool:
    """Whether the page has code, and no other test file names the page: those run its code themselves."""
    others = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    return bool(_blocks(page)) and not any(page.name in path.read_text() for path in others)


@pytest.mark.parametrize("page", [page for page in PAGES if _tested_here(page)], ids=lambda page: page.stem)
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """All blocks of a page in turn, as a reader would type them."""
    for module in NEEDS.get(page.stem, ()):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": page.stem}
    for number, block in enumerate(_blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


def test_the_example_of_an_instruction_set_has_the_same_bits(tmp_path):
    """The page's files, compiled by the page's command."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    page = ROOT / "docs" / "extending.md"
    for text in _blocks(page, "cpp"):
        name = re.match(r"// (?:\S*/)?(\w+\.cc)\n", text)
        assert name is not None
        (tmp_path / name[1]).write_text(text)
    (commands,) = _blocks(page, "sh")
    (tmp_path / "xla_ffi").symlink_to(ROOT / "xla_ffi")
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "portable and tall: the same bits\n"


@pytest.mark.parametrize("text", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_text(text):
    """Cells of the .ipynb are those of the .py that jupytext pairs it with, and were run in order."""
    jupytext = pytest.importorskip("jupytext")
    cells = json.loads(text.with_suffix(".ipynb").read_text())["cells"]
    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(text).cells]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == expected
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [out for cell in code for out in cell["outputs"] if out["output_type"] == "error"]
    assert any("image/png" in out.get("data", {}) for cell in code for out in cell["outputs"])
