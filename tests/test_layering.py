"""A file imports only from what stands above it, as CONTRIBUTING.md says."""

import ast
import runpy
from pathlib import Path

import pytest

import jax_w4a8

PACKAGE = Path(jax_w4a8.__file__).parent
ORDER = (
    ("_native",),
    ("threads",),
    ("quantization",),
    ("buffers",),
    ("packing",),
    ("weights",),
    ("invariance",),
    ("trainable",),
    ("partition",),
    ("sharding",),
    ("sharded_calls",),
    ("routing",),
    ("ffi",),
    ("distributed",),
    ("experts.base",),
    ("experts.batching",),
    ("experts.xla",),
    ("experts.cpu_int4",),
    ("experts.backward",),
    ("experts.gradients",),
    ("oracle",),
    ("moe", "linear", "ragged"),
    ("blocks",),
    ("nnx", "linen", "qwix"),
    ("checkpoint",),
    ("models",),
    ("bench",),
    ("commands",),
    ("cli",),
    ("__main__",),
)


def _level(module: str) -> int:
    """Place of ``module`` (without the package's name) in the order; a package's modules share one."""
    for level, names in enumerate(ORDER):
        if any(module == name or module.startswith(name + ".") for name in names):
            return level
    raise AssertionError(f"{module} has no place in the order: give it one here and in CONTRIBUTING.md")


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in ("", "experts"):
            found[name] = path
    return found


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "jax_w4a8":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax_w4a8."):
            names.add(node.module.removeprefix("jax_w4a8."))
        elif isinstance(node, ast.Import):
            names |= {a.name.removeprefix("jax_w4a8.") for a in node.names if a.name.startswith("jax_w4a8.")}
    return names


@pytest.mark.parametrize("module", _modules())
def test_imports_point_upwards(module):
    level = _level(module)
    package = module.split(".")[0]
    for imported in _imports(_modules()[module]):
        same_package = imported.split(".")[0] == package and package != "experts"
        assert same_package or _level(imported) < level, f"{module} imports {imported}"


def test_nothing_private_of_jax_is_imported():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path  # [E12]


def test_the_picture_is_up_to_date():
    """docs/architecture.svg shows the order above and the files there are."""
    tool = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "architecture.py"))
    picture = tool["draw"]()
    for module in _modules():
        assert f">{module.split('.')[-1]}" in picture or f"/{module.split('.')[-1]}" in picture, module
    message = "docs/architecture.svg is out of date: python tools/architecture.py"
    assert tool["PICTURE"].read_text() == picture, message
