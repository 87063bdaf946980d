"""docs/transforms.md: its code runs, and the tests that it names exist."""

import re

import pytest

from tests import reference

from .pages import check_named_tests

PAGE = (reference.ROOT / "docs" / "transforms.md").read_text()


def test_every_row_names_a_test_that_exists():
    rows, names = check_named_tests(PAGE)
    assert rows == names >= 40


@pytest.mark.filterwarnings("default")
def test_code_runs():
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, namespace)
    assert namespace["y"].shape == (10, 64)
    assert set(namespace["gradients"][1]) == {"w13", "w2"}
