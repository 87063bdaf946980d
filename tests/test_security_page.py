"""SECURITY.md: every threat names a test that exists."""

from .pages import check_named_tests
from .reference import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_threat_names_a_test_that_exists():
    threats = PAGE.split("## Threats")[1].split("\n## ")[0]
    rows, names = check_named_tests(threats)
    assert rows == names >= 30


def test_nobody_s_address_is_given():
    assert "private vulnerability reporting" in PAGE
    assert "@" not in PAGE
