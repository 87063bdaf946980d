"""The MoE block as one function: router, experts, shared experts. What both Flax front ends run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_w4a8.experts.base import Activation, check_tokens
from jax_w4a8.moe import fused_experts, moe
from jax_w4a8.packing import BLOCK_CHANNELS
from jax_w4a8.quantization import CHANNELWISE, QuantizedTensor, normalize_group_size, quantize
from jax_w4a8.routing import Routing
from jax_w4a8.weights import (
    ExpertWeights,
    LinearWeights,
    num_blocks,
    pack_experts,
    pack_linear,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoEWeights:
    """Everything that an MoE block learns.

    Attributes:
      router: floating point ``[H, E]``.
      experts: packed weights of the E routed experts.
      router_bias: floating point ``[E]``, added to the router's logits, or None.
      correction_bias: float32 ``[E]``, added to the scores for the choice of experts alone, or None.
      shared: packed weights of the shared experts: one gated MLP that every token goes through (E = 1), of
        any intermediate size, or None.
      shared_gate: floating point ``[H]``: the shared experts' output is multiplied by
        ``sigmoid(x @ shared_gate)``; or None.
    """

    router: Any
    experts: ExpertWeights
    router_bias: Any = None
    correction_bias: Any = None
    shared: ExpertWeights | None = None
    shared_gate: Any = None

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the array at fault, unless all parts fit together."""
        self.experts.check()
        hidden, experts = self.experts.hidden_size, self.experts.num_experts
        _check_float(self.router, (hidden, experts), "router")
        _check_float(self.router_bias, (experts,), "router_bias")
        _check_float(self.correction_bias, (experts,), "correction_bias")
        _check_float(self.shared_gate, (hidden,), "shared_gate")
        if self.shared is None:
            if self.shared_gate is not None:
                raise ValueError("shared_gate needs shared experts to gate, and shared is None")
            return
        self.shared.check()
        if self.shared.num_experts != 1 or self.shared.hidden_size != hidden:
            raise ValueError(
                f"shared must hold one gated MLP on {hidden} inputs, got {self.shared.num_experts} on "
                f"{self.shared.hidden_size}: several shared experts are one with a larger intermediate size"
            )


def _check_float(array: Any, shape: tuple[int, ...], name: str) -> None:
    if array is None:
        return
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {array.dtype}")
    if tuple(array.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(array.shape)}")


def router_logits(x: jax.Array, router: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """``x @ router + bias`` in float32, whatever the dtypes: float32 ``[..., E]``."""
    logits = jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def moe_block(
    x: jax.Array,
    weights: MoEWeights,
    routing: Routing,
    *,
    activation: str | Activation = "silu",
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
) -> jax.Array:
    """Routed experts plus shared experts.

    Args:
      x: tokens ``[..., H]``, float32, bfloat16 or float16.
      weights: :class:`MoEWeights`.
      routing, activation, activation_scheme, backend: as for :func:`jax_w4a8.moe`.

    Returns:
      ``[..., H]`` in the dtype of ``x``.

    Raises:
      TypeError, ValueError: as :func:`jax_w4a8.moe`.
    """
    x = check_tokens(x, weights.experts.hidden_size)
    y = moe(
        x,
        router_logits(x, weights.router, weights.router_bias),
        weights.experts,
        routing,
        correction_bias=weights.correction_bias,
        activation=activation,
        activation_scheme=activation_scheme,
        backend=backend,
    )
    if weights.shared is None:
        return y
    gate = jnp.ones((*x.shape[:-1], 1), jnp.float32)
    if weights.shared_gate is not None:
        gate = jax.nn.sigmoid(router_logits(x, weights.shared_gate[:, None]))
    return y + fused_experts(
        x,
        gate,
        jnp.zeros(gate.shape, jnp.int32),
        weights.shared,
        activation=activation,
        activation_scheme=activation_scheme,
        backend=backend,
    )


def with_bias(weights: LinearWeights, bias: jax.Array | None) -> LinearWeights:
    """The same packed matrices with another bias ``[..., N]``; None keeps the one they have."""
    if bias is None:
        return weights
    blocks = num_blocks(weights.out_features)
    filling = blocks * BLOCK_CHANNELS - weights.out_features
    padded = jnp.pad(bias.astype(jnp.float32), [(0, 0)] * (bias.ndim - 1) + [(0, filling)])
    return dataclasses.replace(weights, bias=padded.reshape(*bias.shape[:-1], blocks, BLOCK_CHANNELS))


def layer_group_size(group_size: int | None, in_features: int) -> int:
    """The group size of a layer in a model whose layers are of all widths: a group that would hold all inputs
    and more is channel-wise (-1), which needs no filling up.

    Raises:
      ValueError: as :func:`jax_w4a8.quantize`.
    """
    if group_size is not None and group_size > in_features:
        return CHANNELWISE
    return normalize_group_size(group_size, in_features)


def quantize_for(weights: Any, group_size: int | None, scale_dtype: Any = None) -> QuantizedTensor:
    """As :func:`jax_w4a8.quantize`, with the group size of :func:`layer_group_size`."""
    return quantize(weights, layer_group_size(group_size, weights.shape[-1]), scale_dtype=scale_dtype)


# Compiled as wholes: as single operations they would be dozens of small programs.
@functools.partial(jax.jit, static_argnames=("in_features", "out_features", "group_size"))
def random_linear(
    key: jax.Array, in_features: int, out_features: int, group_size: int | None
) -> LinearWeights:
    """Packed weights ``[N, K]`` drawn by LeCun's rule (a variance of 1 / K), then quantised."""
    return pack_linear(quantize_for(_lecun(key, (out_features, in_features)), group_size))


@functools.partial(jax.jit, static_argnames=("num_experts", "hidden_size", "intermediate_size", "group_size"))
def random_experts(
    key: jax.Array, num_experts: int, hidden_size: int, intermediate_size: int, group_size: int | None
) -> ExpertWeights:
    """Packed weights of E experts drawn by LeCun's rule, then quantised."""
    first, second = jax.random.split(key)
    w13 = _lecun(first, (num_experts, 2 * intermediate_size, hidden_size))
    w2 = _lecun(second, (num_experts, hidden_size, intermediate_size))
    return pack_experts(quantize_for(w13, group_size), quantize_for(w2, group_size))


def _lecun(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) / np.float32(np.sqrt(shape[-1]))
