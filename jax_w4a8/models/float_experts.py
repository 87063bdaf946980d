"""Experts that a checkpoint leaves in floating point."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8.checkpoint import FloatExperts
from jax_w4a8.experts.base import Activation
from jax_w4a8.experts.xla import activate
from jax_w4a8.models.layers import matmul_float


def apply_float_experts(
    x: jax.Array, weights: jax.Array, ids: jax.Array, experts: FloatExperts, activation: Activation
) -> jax.Array:
    """The weighted sum of each token's experts.

    Few tokens read only the experts that they chose; many pass through all experts in turn, each of which
    counts for those that chose it.

    Args:
      x: float32 ``[..., H]``.
      weights, ids: ``[..., k]``, as :func:`jax_w4a8.route` gives them.
      experts: weights in floating point.
      activation: between the projections.

    Returns:
      float32 ``[..., H]``.
    """
    tokens, k, hidden = math.prod(x.shape[:-1]), ids.shape[-1], x.shape[-1]
    rows, weights, ids = x.reshape(tokens, hidden), weights.reshape(tokens, k), ids.reshape(tokens, k)
    if tokens * k < experts.w13.shape[0]:
        chosen = jax.tree.map(lambda leaf: jnp.take(leaf, ids.reshape(-1), axis=0), experts)
        slots = lax.map(
            lambda slot: _expert(slot[0][None], slot[1], activation)[0], (jnp.repeat(rows, k, axis=0), chosen)
        )
        y = (slots.reshape(tokens, k, hidden) * weights[..., None]).sum(axis=1)
    else:
        y = _through_all(rows, weights, ids, experts, activation)
    return y.reshape(x.shape)


def _through_all(
    rows: jax.Array, weights: jax.Array, ids: jax.Array, experts: FloatExperts, activation: Activation
) -> jax.Array:
    def add(y: jax.Array, numbered: tuple[jax.Array, FloatExperts]) -> tuple[jax.Array, None]:
        number, expert = numbered
        share = jnp.where(ids == number, weights, 0).sum(axis=-1, keepdims=True)
        return y + jnp.where(share == 0, 0, share * _expert(rows, expert, activation)), None

    numbers = jnp.arange(experts.w13.shape[0], dtype=ids.dtype)
    return lax.scan(add, jnp.zeros(rows.shape, jnp.float32), (numbers, experts))[0]


def _expert(rows: jax.Array, expert: FloatExperts, activation: Activation) -> jax.Array:
    """One expert (leaves without the E axis): float32 ``[M, H]`` to the same."""
    pairs = matmul_float(rows, expert.w13)
    if expert.w13_bias is not None:
        pairs += expert.w13_bias
    gate, up = jnp.split(pairs, 2, axis=-1)
    y = matmul_float(activate(gate, up, activation), expert.w2)
    return y if expert.w2_bias is None else y + expert.w2_bias
