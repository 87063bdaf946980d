"""Pages whose tables name tests: what they name must exist."""

from __future__ import annotations

import ast
import re

from .reference import ROOT

_NAMED = re.compile(r"`(tests/\w+\.py)::([\w:]+)`")


def _defined(path: str) -> set[str]:
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def check_named_tests(page: str) -> tuple[int, int]:
    """Asserts that every test that a page names exists; the numbers of its tables' rows and of names."""
    named = _NAMED.findall(page)
    for path, name in named:
        assert name in _defined(path), f"{path}::{name}"
    lines = [*page.splitlines(), ""]
    rows = [
        line for i, line in enumerate(lines) if line.startswith("| ") and not lines[i + 1].startswith("| ---")
    ]
    return len([row for row in rows if not row.startswith("| ---")]), len(named)
