"""Damage that parsers of JSON don't stop at: one value, key or entry of the text is changed."""

from __future__ import annotations

import json
import random
from typing import Any

#: What a field may hold that nobody expects there.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    32,
    63,
    2**31 - 1,
    2**31,
    2**63,
    2**64,
    10**400,
    -(2**63),
    0.5,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "silu",
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\x",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "re:(a+)+$",
    "re:(",
    [],
    [0],
    [[]],
    [None, 1],
    [2**62, 2**62],
    [-1, 4],
    {},
    {"a": 1},
    {"type": "yarn"},
)


def mutate_json(text: bytes, rng: random.Random) -> bytes | None:
    """The text after one to three changes; None if it is no JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    try:
        for _ in range(rng.randint(1, 3)):
            value = _change(value, rng)
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return None


def _change(value: Any, rng: random.Random) -> Any:
    """One place of ``value`` becomes another; deep ones are as likely as shallow ones."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((node, key))
            collect(child)

    collect(value)
    if not places:
        return rng.choice(VALUES)
    node, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del node[key]
    elif kind == 1:
        other, source = rng.choice(places)
        if (isinstance(other, list) and source >= len(other)) or (
            isinstance(other, dict) and source not in other
        ):
            return value
        node[key] = json.loads(json.dumps(other[source]))
    elif kind == 2 and isinstance(node[key], int) and not isinstance(node[key], bool):
        node[key] += rng.choice((-1, 1, 8, -8, 32, node[key]))
    elif kind == 3 and isinstance(node, list):
        node.append(rng.choice(VALUES))
    elif kind == 3:
        node[f"{key}_"] = node.pop(key)
    else:
        node[key] = rng.choice(VALUES)
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four bits, bytes or runs of ``data`` change; or it ends early."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not result:
            return bytes(rng.randbytes(8))
        at, kind = rng.randrange(len(result)), rng.randrange(5)
        if kind == 0:
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result[at : at + 8] = rng.choice((0, 1, 2**31, 2**40, 2**62, 2**64 - 1)).to_bytes(8, "little")
        elif kind == 2:
            del result[at : at + rng.randint(1, 64)]
        elif kind == 3:
            result[at:at] = result[at : at + rng.randint(1, 64)]
        else:
            del result[at:]
    return bytes(result)


def mutate(data: bytes, seed: int) -> bytes:
    """Half of the time as JSON, where the data are JSON after up to two bytes."""
    rng = random.Random(seed)
    if rng.random() < 0.6:
        for start in (2, 1, 0):
            changed = mutate_json(data[start:], rng)
            if changed is not None:
                return data[:start] + changed
        length = int.from_bytes(data[:8], "little")
        if 8 < length < len(data):  # a safetensors file
            changed = mutate_json(data[8 : 8 + length], rng)
            if changed is not None:
                return len(changed).to_bytes(8, "little") + changed + data[8 + length :]
    return mutate_bytes(data, rng)
