"""The weights of W4A8 layers, widened where they are used, on activations in floating point.

What this computes, W4A8 computes with INT8 activations: the difference is what those cost. Weights stay
packed in memory; each layer widens its own, expert by expert, at every call.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8.experts.base import Activation
from jax_w4a8.experts.xla import activate
from jax_w4a8.models.layers import matmul_float
from jax_w4a8.weights import ExpertWeights, unpack_experts


def fused_experts_float(
    x: jax.Array, weights: jax.Array, ids: jax.Array, experts: ExpertWeights, activation: Activation
) -> jax.Array:
    """As :func:`jax_w4a8.fused_experts`, without quantising activations; every expert sees every token.

    Args:
      x: float32 ``[..., H]``.
      weights, ids: ``[..., k]``; id -1 adds nothing.
      experts: packed weights.
      activation: between the projections.

    Returns:
      float32 ``[..., H]``.
    """
    tokens = math.prod(x.shape[:-1])
    rows = x.reshape(tokens, x.shape[-1])
    weights, ids = (array.reshape(tokens, -1) for array in (weights, ids))

    def add(total: jax.Array, numbered: tuple[jax.Array, ExpertWeights]) -> tuple[jax.Array, None]:
        number, expert = numbered
        share = jnp.where(ids == number, weights, 0).sum(axis=-1, keepdims=True)
        return total + jnp.where(share == 0, 0, share * _expert(rows, expert, activation)), None

    numbers = jnp.arange(experts.num_experts, dtype=ids.dtype)
    total, _ = lax.scan(add, jnp.zeros(rows.shape, jnp.float32), (numbers, experts))
    return total.reshape(x.shape)


def _expert(rows: jax.Array, expert: ExpertWeights, activation: Activation) -> jax.Array:
    """One expert, its arrays without the E axis: float32 ``[M, H]`` to the same."""
    w13, w2, w13_bias, w2_bias = unpack_experts(expert)
    gate, up = jnp.split(matmul_float(rows, w13.dequantize()) + w13_bias, 2, axis=-1)
    return matmul_float(activate(gate, up, activation), w2.dequantize()) + w2_bias
