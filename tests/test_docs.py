"""Code and commands in the documentation run, its reference is complete, notebooks and pictures agree."""

import doctest
import importlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_w4a8 import cli

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
API = ROOT / "docs" / "api.md"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
#: What a page's code needs beside the package.
NEEDS = {"flax": ("flax", "orbax.checkpoint", "qwix"), "quickstart": ("flax",), "sharp-bits": ("flax",)}
#: Names that a module's examples use without importing them.
EXAMPLE_NAMES = {"nnx.quantizing": {"nnx": "flax.nnx"}, "qwix": {"jax": "jax", "qwix": "qwix"}}
#: Modules whose public names are all in the reference.
PUBLIC = ("", ".nnx", ".linen", ".qwix", ".sharding", ".models", ".checkpoint")


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
    (block,) = _blocks(README)[1:]
    namespace: dict = {}
    exec(block.replace("path/to/checkpoint", str(models.default_model_path())), namespace)
    assert namespace["logits"].shape == (1, 3, 2048)
    assert namespace["ids"].shape[0] == 1


def _modules_with_examples() -> list[str]:
    package = ROOT / "jax_w4a8"
    paths = [path for path in sorted(package.rglob("*.py")) if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(package).with_suffix("").parts) for path in paths]
    return [name.removesuffix("__init__").removesuffix(".") for name in names]


@pytest.mark.parametrize("name", _modules_with_examples())
def test_examples_in_docstrings_run(name):
    names = {alias: pytest.importorskip(other) for alias, other in EXAMPLE_NAMES.get(name, {}).items()}
    module = importlib.import_module(f"jax_w4a8.{name}".removesuffix("."))
    results = doctest.testmod(module, extraglobs=names)
    assert results.attempted > 0
    assert results.failed == 0


def _commands() -> list[str]:
    """Lines of all shell blocks, without what a line only sets up or comments on."""
    lines = [
        line for page in [README, *PAGES] for block in _blocks(page, "sh") for line in block.splitlines()
    ]
    parts = [part for line in lines for part in re.split(r" && ", line.split("  #")[0])]
    return [part.strip() for part in parts if part.strip()]


def test_the_command_line_takes_the_documented_commands():
    commands = [line.split("-m jax_w4a8 ")[1] for line in _commands() if "-m jax_w4a8 " in line]
    assert {command.split()[0] for command in commands} >= {"generate", "quantize", "bench"}
    parser = cli._parser()
    for command in commands:
        parser.parse_args(shlex.split(command))  # exits with what is wrong


def test_files_and_extras_of_documented_commands_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = set()
    for text in [README.read_text(), *(page.read_text() for page in PAGES)]:
        found |= set(re.findall(r"\b(?:bash|python) ((?:tools|examples|benchmarks)/[\w./]+)", text))
        for names in re.findall(r"'(?:\.|jax_w4a8)\[([\w,]+)\]'", text):
            assert set(names.split(",")) <= set(extras), names
    assert {"tools/test.sh", "tools/docs.sh"} <= found
    assert not [name for name in found if not (ROOT / name).is_file()]


def test_links_to_files_lead_somewhere():
    for page in [README, *PAGES]:
        for target in re.findall(r"\]\(([^)\s#:]+)(?:#[^)]*)?\)", page.read_text()):
            # Sphinx finds notebooks beside the pages, where docs/conf.py copies them.
            places = [page.parent / target] + [ROOT / target] * target.startswith("notebooks/")
            assert any(place.exists() for place in places), f"{page.name}: {target}"


def _documented() -> list[object]:
    """What docs/api.md has a directive for."""
    module, found = None, []
    for directive, name in re.findall(
        r"^\.\. (currentmodule|data|auto\w+):: (\S+)$", API.read_text(), re.MULTILINE
    ):
        if directive == "currentmodule":
            module = importlib.import_module(name)
        else:
            found.append(getattr(module, name))
    return found


def _public_names(module) -> list[str]:
    """``__all__``, or what the module defines."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def test_the_reference_has_every_public_name():
    for needed in ("flax", "safetensors", "tokenizers"):
        pytest.importorskip(needed)
    documented = _documented()
    for suffix in PUBLIC:
        module = importlib.import_module(f"jax_w4a8{suffix}")
        names = _public_names(module)
        assert len(names) > 2, module
        missing = [name for name in names if not any(getattr(module, name) is one for one in documented)]
        assert not missing, f"docs/api.md has no {missing} of {module.__name__}"


def _tested_here(page: Path) -> bool:
    """Whether the page has code that no other test file runs."""
    others = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    return bool(_blocks(page)) and not any(page.name in text and "```python" in text for text in others)


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
