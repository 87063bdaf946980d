"""How many examples property tests try: few and always the same, or a hundred times as many at random.

``pytest tests/test_properties.py --hypothesis-profile=long`` is the latter.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("short", max_examples=20, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "long", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("short")
