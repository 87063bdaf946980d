"""How many examples property tests try, and what comes first.

Property tests try few examples, always the same; a hundred times as many at random with
``pytest tests/test_properties.py --hypothesis-profile=long``.
"""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("short", max_examples=20, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "long", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("short")

#: These compile for minutes: begun last, they would keep one of two workers waiting for the other.
_LONGEST = ("test_sanitizers.py", "test_platforms.py", "test_native.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST)
