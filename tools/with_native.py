"""Runs pytest with another build of the extension: ``python tools/with_native.py _native.so ARGUMENT...``."""

import importlib.machinery
import importlib.util
import sys

import pytest

NAME = "jax_w4a8._native"


def main(library: str, *arguments: str) -> int:
    """Puts the extension in `library` where the package looks for its own, then runs pytest."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, library)
    spec = importlib.util.spec_from_file_location(NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[NAME] = module
    return pytest.main(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
