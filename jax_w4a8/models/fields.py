"""Typed access to the fields of a ``config.json``, with errors that name the field."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.checkpoint.errors import shortened
from jax_w4a8.experts.base import Activation

#: No size of a model comes near; larger numbers would overflow where sizes are multiplied or kept in 32 bits.
LARGEST_INTEGER = 2**31 - 1
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class Fields:
    """The fields of a model's configuration.

    A field that is absent or null takes its default; without a default it is an error. Every error is a
    CheckpointError that names file and field.
    """

    def __init__(self, config: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._config = config
        self._where = where
        self._prefix = prefix

    def get(self, name: str) -> Any:
        """The raw value, None when absent."""
        return self._config.get(name)

    def error(self, name: str, expected: str) -> CheckpointError:
        """An error about the value of a field."""
        return CheckpointError(
            f"{self._where}: {self._prefix}{name} must be {expected}, got {shortened(self.get(name))}"
        )

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``."""
        expected = f"an integer of at least {minimum}"
        value = self._value(name, default, expected)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(name, expected)
        if value > LARGEST_INTEGER:
            raise self.error(name, f"an integer of at most {LARGEST_INTEGER}")
        return value

    def number(
        self, name: str, default: float | None = None, *, maximum: float = sys.float_info.max
    ) -> float:
        """A positive number of at most ``maximum``, not infinite."""
        value = self._value(name, default, "a positive number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(name, "a positive number")
        if value > maximum:
            raise self.error(name, f"a positive number of at most {maximum:g}")
        return float(value)

    def optional_number(self, name: str, *, maximum: float = sys.float_info.max) -> float | None:
        """A positive number of at most ``maximum``, or None when absent."""
        return None if self.get(name) is None else self.number(name, maximum=maximum)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of non-negative integers; absent means empty, a single integer a list of one."""
        value = self.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values) or not all(
            0 <= v <= LARGEST_INTEGER for v in values
        ):
            raise self.error(name, "non-negative integers")
        return tuple(values)

    def same_integer(self, *names: str) -> int:
        """A positive integer that goes by several names; those present must agree."""
        present = [name for name in names if self.get(name) is not None]
        if not present:
            raise CheckpointError(f"{self._where}: {' or '.join(names)} is missing")
        values = {name: self.integer(name) for name in present}
        if len(set(values.values())) > 1:
            raise CheckpointError(f"{self._where}: fields contradict each other: {values}")
        return values[present[0]]

    def activation(self, name: str) -> Activation:
        """The activation of gated MLPs."""
        value = self.get(name)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.error(name, f"one of {sorted(_ACTIVATIONS)}")
        return Activation(_ACTIVATIONS[value])

    def within(self, name: str) -> Fields:
        """The fields of the object ``name``; absent or null is an object without fields."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(name, "a JSON object or null")
        return Fields(value, self._where, f"{self._prefix}{name}.")

    def names(self) -> frozenset[str]:
        """Names of the fields that are there and not null."""
        return frozenset(name for name, value in self._config.items() if value is not None)

    def _value(self, name: str, default: Any, expected: str) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{name} is missing, expected {expected}")
        return value
