"""Where the time of a compiled program goes, by the parts of the model that its operations belong to."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

#: Parts by what an operation's name holds, the first match counts. Scopes are those of ``models/decoder.py``.
_PARTS = (
    ("experts", re.compile(r"fused_experts|w4a8_moe")),
    ("attention projections", re.compile(r"/attention/.*linear")),
    ("attention", re.compile(r"/attention/")),
    ("router", re.compile(r"/router/")),
    ("dense MLP", re.compile(r"/mlp/.*linear")),
    ("routing, residual", re.compile(r"/mlp/")),
    ("norms", re.compile(r"norm/")),
    ("head", re.compile(r"/head/")),
    ("sampling", re.compile(r"/sampling/")),
    ("embedding", re.compile(r"/embedding/")),
)
OTHER = "other"
PARTS = (*(name for name, _ in _PARTS), OTHER)
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r"metadata=\{[^}]*op_name=\"([^\"]*)\"")
_CONTAINERS = re.compile(r"^(while|call|conditional)[.\d]*$")


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one call, by part.

    Attributes:
      milliseconds: of operations, by part; those that ran at the same time count twice.
      operations: how many there are.
    """

    milliseconds: dict[str, float]
    operations: int

    @property
    def total(self) -> float:
        """Of all parts."""
        return sum(self.milliseconds.values())


def part_of(op_name: str) -> str:
    """The part that an operation belongs to, by its name in the compiled program."""
    return next((name for name, pattern in _PARTS if pattern.search(op_name)), OTHER)


def breakdown(compiled: Any, call: Callable[[], None], calls: int) -> Breakdown:
    """Traces ``calls`` calls of one compiled program.

    Args:
      compiled: what ``jax.jit(...).lower(...).compile()`` gives.
      call: calls it once and waits for it.
      calls: how often.
    """
    part_by_operation = _parts(compiled.as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                call()
        file = next(Path(folder).rglob("*.xplane.pb"))
        with warnings.catch_warnings():
            # Some jaxlibs make a type at the first event, deprecated, and abort where that is an error.
            warnings.simplefilter("ignore", DeprecationWarning)
            events = list(_operations(ProfileData.from_file(str(file))))
    nanoseconds: dict[str, float] = defaultdict(float)
    for name, duration in events:
        nanoseconds[part_by_operation.get(name, OTHER)] += duration
    return Breakdown({part: nanoseconds[part] / calls / 1e6 for part in PARTS}, len(events) // calls)


def _parts(text: str) -> dict[str, str]:
    """The part of every operation of a compiled program.

    Some fusions lose their name. They count with the next named operation of their computation, which the
    text lists in the order of execution.
    """
    found: dict[str, str] = {}
    unnamed: list[str] = []
    for line in text.splitlines():
        operation = _OPERATION.match(line)
        if operation is None:
            unnamed.clear()
            continue
        op_name = _OP_NAME.search(line)
        if op_name is not None and "/" in op_name[1]:
            part = part_of(op_name[1])
            found |= dict.fromkeys([*unnamed, operation[1]], part)
            unnamed.clear()
        elif " parameter(" not in line and " constant(" not in line:
            unnamed.append(operation[1])
    return found


def _operations(profile: Any) -> Any:
    """(name, nanoseconds) of every operation that does work itself; loops count by what runs in them."""
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = stats.get("hlo_op")
                if name is None or event.name.startswith("end: ") or _CONTAINERS.match(name):
                    continue
                yield name, event.duration_ns
