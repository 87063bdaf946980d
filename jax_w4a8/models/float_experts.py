"""Experts on floating point activations: those that a checkpoint leaves unquantised, and packed ones.

Packed weights stay packed in memory; each expert is widened where it is used, at every call. What separates
that from :func:`jax_w4a8.fused_experts` is the cost of INT8 activations.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8.checkpoint import FloatExperts
from jax_w4a8.experts.base import Activation
from jax_w4a8.experts.xla import activate
from jax_w4a8.models.layers import matmul_float
from jax_w4a8.weights import ExpertWeights, unpack_experts


def apply_float_experts(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    experts: FloatExperts | ExpertWeights,
    activation: Activation,
) -> jax.Array:
    """The weighted sum of each token's experts.

    Experts come in turn, and those that no token chose are passed over unread; so a token's experts are added
    in ascending order, whatever the other tokens chose.

    Args:
      x: float32 ``[..., H]``.
      weights, ids: ``[..., k]``, as :func:`jax_w4a8.route` gives them; id -1 adds nothing.
      experts: weights in floating point, or packed ones, which are widened.
      activation: between the projections.

    Returns:
      float32 ``[..., H]``.
    """
    experts = jax.tree.map(jnp.asarray, experts)
    tokens, k, hidden = math.prod(x.shape[:-1]), ids.shape[-1], x.shape[-1]
    rows, weights, ids = x.reshape(tokens, hidden), weights.reshape(tokens, k), ids.reshape(tokens, k)

    def add(number: Any, y: jax.Array) -> jax.Array:
        chosen = ids == number

        def share() -> jax.Array:
            expert = _widened(jax.tree.map(lambda leaf: leaf[number], experts))
            weight = jnp.where(chosen, weights, 0).sum(axis=-1, keepdims=True)
            part = lax.optimization_barrier(weight * _expert(rows, expert, activation))
            return y + jnp.where(chosen.any(axis=-1, keepdims=True), part, 0)

        return lax.cond(chosen.any(), share, lambda: y)

    count = jax.tree.leaves(experts)[0].shape[0]
    y = lax.fori_loop(0, count, add, jnp.zeros(rows.shape, jnp.float32))
    return y.reshape(x.shape)


def _widened(expert: FloatExperts | ExpertWeights) -> FloatExperts:
    """One expert, its leaves without the E axis."""
    if isinstance(expert, FloatExperts):
        return expert
    w13, w2, w13_bias, w2_bias = unpack_experts(expert)
    return FloatExperts(w13.dequantize(), w2.dequantize(), w13_bias, w2_bias)


def _expert(rows: jax.Array, expert: FloatExperts, activation: Activation) -> jax.Array:
    """One expert (leaves without the E axis): float32 ``[M, H]`` to the same."""
    pairs = matmul_float(rows, expert.w13)
    if expert.w13_bias is not None:
        pairs += expert.w13_bias
    gate, up = jnp.split(pairs, 2, axis=-1)
    y = matmul_float(activate(gate, up, activation), expert.w2)
    return y if expert.w2_bias is None else y + expert.w2_bias
