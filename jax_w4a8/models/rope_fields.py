"""Reads rotary positions from a ``config.json``, in the spelling of any version of transformers.

Newer files hold everything in ``rope_parameters``; older ones hold ``rope_theta`` and, for stretched kinds,
``rope_scaling`` with ``type`` in place of ``rope_type``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import numpy as np

from jax_w4a8.models.fields import LARGEST_INTEGER, Fields
from jax_w4a8.models.rotary import ROTARY_KINDS, RotaryConfig, RotaryKind, yarn_scale

logger = logging.getLogger(__name__)

_WIDEST = 1 << 16
#: Of factors on attention logits, which are about 1 in models; far larger ones overflow.
_MOST_GROWTH = 1e4
_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
}


def rope_parameters(fields: Fields) -> Fields:
    """The object that describes rotary positions; one without fields when there is none.

    Raises:
      CheckpointError: it is no object, or differs by layer.
    """
    older = fields.within("rope_scaling")
    rope = older if older.names() else fields.within("rope_parameters")
    for name in rope.names():
        if isinstance(rope.get(name), Mapping):
            raise rope.error(name, "a plain value: all layers have the same rotary positions")
    return rope


def read_rotary(
    fields: Fields, dim: int, *, default_theta: float = 10000.0, interleaved: bool = False
) -> RotaryConfig:
    """Rotary positions of ``dim`` channels per head.

    Raises:
      CheckpointError: a kind that isn't supported, such as ``longrope``, or a field of a wrong type or value.
    """
    if dim % 2 or dim > _WIDEST:
        raise fields.error(
            "head_dim", f"such that rotary positions have an even width up to {_WIDEST}, not {dim}"
        )
    rope = rope_parameters(fields)
    kind = _kind(rope)
    for where in (fields, rope):
        if where.number("partial_rotary_factor", 1.0) != 1.0:
            raise where.error("partial_rotary_factor", "absent or 1: all of a head's width has positions")
    for name in sorted(rope.names() - _KNOWN):
        logger.warning("%r of rope_parameters is unknown and ignored", name)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    plain = RotaryConfig(dim, theta, interleaved=interleaved)
    rotary = plain if kind == "default" else _stretched(fields, rope, plain, kind)
    _check_finite(rope, rotary)
    return rotary


def _check_finite(rope: Fields, rotary: RotaryConfig) -> None:
    """Raises CheckpointError for parameters that no model has: positions would turn by NaN or infinity."""
    try:
        with np.errstate(all="ignore"):
            frequencies = rotary.frequencies()
        usable = np.isfinite(frequencies).all() and rotary.positions <= LARGEST_INTEGER
    except (ArithmeticError, ValueError):
        usable = False
    if not usable or (rotary.kind == "dynamic" and rotary.dim <= 2):
        raise rope.error(
            "rope_theta", f"such that {rotary.kind} frequencies of width {rotary.dim} are finite"
        )


def _kind(rope: Fields) -> RotaryKind:
    name = "type" if rope.get("rope_type") is None else "rope_type"
    kind = "default" if rope.get(name) is None else rope.get(name)
    if not isinstance(kind, str) or kind not in ROTARY_KINDS:
        raise rope.error(name, f"one of {sorted(ROTARY_KINDS)}")
    return cast(RotaryKind, kind)


def _stretched(fields: Fields, rope: Fields, plain: RotaryConfig, kind: RotaryKind) -> RotaryConfig:
    positions = fields.integer("max_position_embeddings")
    trained = "original_max_position_embeddings"
    original = positions if kind == "dynamic" else rope.integer(trained, positions)
    original = fields.integer(trained, original)
    factor = rope.number("factor", positions / original if kind == "yarn" else None)
    if factor < 1:
        raise rope.error("factor", "at least 1")
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        raise rope.error("high_freq_factor", f"above low_freq_factor {low}")
    return RotaryConfig(
        plain.dim,
        plain.theta,
        kind,
        factor,
        original,
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        low_freq_factor=low,
        high_freq_factor=high,
        interleaved=plain.interleaved,
    )


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    given = rope.optional_number("attention_factor", maximum=_MOST_GROWTH)
    if given is not None:
        return given
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return read_yarn_scale(rope, "mscale", factor) / read_yarn_scale(rope, "mscale_all_dim", factor)
    return yarn_scale(factor)


def read_yarn_scale(rope: Fields, name: str, factor: float) -> float:
    """YaRN's growth of attention logits with the weight that the field ``name`` has."""
    return yarn_scale(factor, rope.number(name, maximum=_MOST_GROWTH))
