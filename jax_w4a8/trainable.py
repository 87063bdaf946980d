"""The float parts of packed weights, on their own: what training may change while codes stay frozen.

>>> import jax, jax.numpy as jnp, jax_w4a8 as w4a8
>>> dense = w4a8.pack_linear(w4a8.quantize(jnp.ones((16, 64)), 32))
>>> def loss(parts, x):
...     return w4a8.linear(x, w4a8.with_trainable_parts(dense, parts)).sum()
>>> gradients = jax.grad(loss)(w4a8.trainable_parts(dense, scales=True), jnp.ones((2, 64)))
>>> {name: gradient.shape for name, gradient in sorted(gradients.items())}
{'bias': (1, 16), 'scale': (1, 2, 16)}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a8.weights import BLOCK_CHANNELS, BLOCK_INPUTS, ExpertWeights, LinearWeights

Packed = TypeVar("Packed", LinearWeights, ExpertWeights)


def trainable_parts(weights: Packed, *, biases: bool = True, scales: bool = False) -> dict[str, Any]:
    """The arrays of packed weights that have gradients, as a pytree of their own.

    Args:
      weights: :class:`LinearWeights` or :class:`ExpertWeights`.
      biases: include biases.
      scales: include weight scales. Their gradient costs a matrix product more per expert, and twice the
        memory, so that it has to be asked for.

    Returns:
      ``{"bias": ..., "scale": ...}`` in the packed layout; for experts ``{"w13": {...}, "w2": {...}}``.

    Raises:
      TypeError: ``weights`` is neither of the two classes.
    """
    if isinstance(weights, ExpertWeights):
        return {
            side: trainable_parts(getattr(weights, side), biases=biases, scales=scales)
            for side in ("w13", "w2")
        }
    if not isinstance(weights, LinearWeights):
        raise TypeError(f"weights must be LinearWeights or ExpertWeights, got {type(weights).__name__}")
    chosen = {"bias": biases, "scale": scales}
    return {name: jnp.asarray(getattr(weights, name)) for name, wanted in chosen.items() if wanted}


def with_trainable_parts(weights: Packed, parts: Mapping[str, Any]) -> Packed:
    """The same weights with other float parts; new scales bring ``scaled_sum`` up to date.

    Differentiable in ``parts``.

    Args:
      weights: :class:`LinearWeights` or :class:`ExpertWeights`.
      parts: what :func:`trainable_parts` gives, or some of it, with other values.

    Raises:
      TypeError: ``weights`` is neither of the two classes.
      ValueError: ``parts`` has a name that isn't one, or an array of another shape.
    """
    if isinstance(weights, ExpertWeights):
        _check_names(parts, ("w13", "w2"))
        sides = {side: with_trainable_parts(getattr(weights, side), part) for side, part in parts.items()}
        return dataclasses.replace(weights, **sides)
    if not isinstance(weights, LinearWeights):
        raise TypeError(f"weights must be LinearWeights or ExpertWeights, got {type(weights).__name__}")
    _check_names(parts, ("bias", "scale"))
    new = dict(parts)
    for name, part in new.items():
        expected = tuple(getattr(weights, name).shape)
        if tuple(np.shape(part)) != expected:
            raise ValueError(f"parts[{name!r}] must have shape {expected}, got {tuple(np.shape(part))}")
    if "scale" in new:
        new["scaled_sum"] = jax.lax.stop_gradient(_scaled_sum(jnp.asarray(weights.codes), new["scale"]))
    return dataclasses.replace(weights, **new)


def _check_names(parts: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = set(parts) - set(known)
    if unknown:
        raise ValueError(f"parts must have names out of {list(known)}, got {sorted(unknown)}")


def _scaled_sum(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 ``[..., NB, 16]`` from packed codes ``[..., NB, G, bytes]``, summed without unpacking them."""
    runs = packed.reshape(*packed.shape[:-1], -1, BLOCK_CHANNELS, 4)
    nibbles = (runs & 15).astype(jnp.int32) + (runs >> 4).astype(jnp.int32)
    inputs = runs.shape[-3] * BLOCK_INPUTS
    sums = (nibbles.sum(axis=(-3, -1)) - 8 * inputs).astype(jnp.float32)  # [..., NB, G, 16]
    total = jnp.zeros_like(sums[..., 0, :])
    for group in range(sums.shape[-2]):
        total = total + sums[..., group, :] * scale[..., group, :].astype(jnp.float32)
    return total
