"""docs/transforms.md: its code runs, and the tests that it names exist."""

import ast
import re

import pytest

from tests import reference

PAGE = (reference.ROOT / "docs" / "transforms.md").read_text()
NAMED = re.findall(r"`(tests/\w+\.py)::([\w:]+)`", PAGE)


def _defined(path: str) -> set[str]:
    found = set()
    for node in ast.parse((reference.ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_every_row_names_a_test_that_exists():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(NAMED) >= 40
    for path, name in NAMED:
        assert name in _defined(path), f"{path}::{name}"


@pytest.mark.filterwarnings("default")
def test_code_runs():
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, namespace)
    assert namespace["y"].shape == (10, 64)
    assert set(namespace["gradients"][1]) == {"w13", "w2"}
