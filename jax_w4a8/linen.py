"""Flax Linen modules whose weights are packed INT4.

Packed arrays live in a collection of their own, ``"w4a8"``, which gradients and optimisers never see; the
router and biases live in ``"params"``. Both are plain dictionaries of arrays: anything that stores a Linen
model's variables stores these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from jax_w4a8.blocks import (
    MoEWeights,
    layer_group_size,
    moe_block,
    random_experts,
    random_linear,
    with_bias,
)
from jax_w4a8.experts.base import Activation
from jax_w4a8.linear import linear
from jax_w4a8.packing import BLOCK_CHANNELS
from jax_w4a8.routing import Routing
from jax_w4a8.weights import ExpertWeights, LinearWeights, num_blocks

COLLECTION = "w4a8"
_ARRAYS = ("codes", "scale", "scaled_sum", "bias")


class W4A8Linear(nn.Module):
    """``x @ W.T + bias`` with INT4 weights and INT8 activations; see :func:`jax_w4a8.linear`.

    ``init`` draws random weights and quantises them; :func:`linear_variables` turns packed weights of one's
    own into this module's variables.

    Attributes:
      features: N; K is that of the input.
      group_size: inputs per scale, -1 for channel-wise; more than K is channel-wise.
      use_bias: whether there is a trainable bias.
      dtype: what inputs are cast to, and so the result's dtype; None leaves them as they come.
      activation_scheme, backend: as for :func:`jax_w4a8.linear`.
    """

    features: int
    group_size: int | None = 128
    use_bias: bool = True
    dtype: DTypeLike | None = None
    activation_scheme: str = "asymmetric"
    backend: str = "auto"

    @nn.compact
    def __call__(self, x: ArrayLike) -> jax.Array:
        """``[..., K]`` (float32, bfloat16 or float16) to ``[..., N]`` of the same dtype, or of ``dtype``."""
        x = jnp.asarray(x, self.dtype)
        inputs = x.shape[-1]
        arrays = self.variable(
            COLLECTION,
            "weight",
            lambda: _arrays(random_linear(self.make_rng("params"), inputs, self.features, self.group_size)),
        )
        bias = self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else None
        weights = _weights(arrays.value, self.features, inputs, self.group_size)
        return linear(
            x, with_bias(weights, bias), activation_scheme=self.activation_scheme, backend=self.backend
        )


class W4A8MoE(nn.Module):
    """A router, its INT4 experts, and shared experts if there are any; see :func:`jax_w4a8.moe`.

    ``init`` draws random weights and quantises them; :func:`moe_variables` turns packed weights of one's own
    into this module's variables.

    Attributes:
      num_experts, intermediate_size: E and I; H is that of the input.
      routing: how experts are chosen (:class:`jax_w4a8.Routing`).
      group_size: inputs per scale, -1 for channel-wise; more than there are inputs is channel-wise.
      shared_intermediate_size: width of the shared experts in all; None for none.
      use_router_bias: whether the router has a trainable bias.
      use_correction_bias: whether scores are corrected for the choice (in ``"w4a8"``: not trainable).
      use_shared_gate: whether the shared output is multiplied by the sigmoid of a trainable product with x.
      activation, activation_scheme, backend: as for :func:`jax_w4a8.moe`.
      dtype: what inputs are cast to, and so the result's dtype; None leaves them as they come.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    group_size: int | None = 128
    shared_intermediate_size: int | None = None
    use_router_bias: bool = False
    use_correction_bias: bool = False
    use_shared_gate: bool = False
    activation: str | Activation = "silu"
    dtype: DTypeLike | None = None
    activation_scheme: str = "asymmetric"
    backend: str = "auto"

    @nn.compact
    def __call__(self, x: ArrayLike) -> jax.Array:
        """``[..., H]`` (float32, bfloat16 or float16) to the same shape and dtype, or to ``dtype``."""
        x = jnp.asarray(x, self.dtype)
        return moe_block(
            x,
            self._all_weights(x.shape[-1]),
            self.routing,
            activation=self.activation,
            activation_scheme=self.activation_scheme,
            backend=self.backend,
        )

    def _all_weights(self, hidden: int) -> MoEWeights:
        experts, zeros = self.num_experts, nn.initializers.zeros
        shared = self.shared_intermediate_size
        correction = None
        if self.use_correction_bias:
            correction = self.variable(COLLECTION, "correction_bias", jnp.zeros, (experts,)).value
        return MoEWeights(
            router=self.param("router", nn.initializers.lecun_normal(), (hidden, experts)),
            experts=self._experts("experts", experts, hidden, self.intermediate_size),
            router_bias=self.param("router_bias", zeros, (experts,)) if self.use_router_bias else None,
            correction_bias=correction,
            shared=None if shared is None else self._experts("shared", 1, hidden, shared),
            shared_gate=self.param("shared_gate", zeros, (hidden,)) if self.use_shared_gate else None,
        )

    def _experts(self, name: str, count: int, hidden: int, inner: int) -> ExpertWeights:
        arrays = self.variable(
            COLLECTION,
            name,
            lambda: _expert_arrays(
                random_experts(self.make_rng("params"), count, hidden, inner, self.group_size)
            ),
        ).value
        return ExpertWeights(
            _weights(arrays["w13"], 2 * BLOCK_CHANNELS * num_blocks(inner), hidden, self.group_size),
            _weights(arrays["w2"], hidden, inner, self.group_size),
        )


def _arrays(weights: LinearWeights) -> dict[str, Any]:
    return {name: getattr(weights, name) for name in _ARRAYS}


def _expert_arrays(experts: ExpertWeights) -> dict[str, Any]:
    return {"w13": _arrays(experts.w13), "w2": _arrays(experts.w2)}


def _weights(arrays: Mapping[str, Any], outputs: int, inputs: int, group_size: int | None) -> LinearWeights:
    return LinearWeights(
        **{name: arrays[name] for name in _ARRAYS},
        out_features=outputs,
        in_features=inputs,
        group_size=layer_group_size(group_size, inputs),
    )


def linear_variables(weights: LinearWeights, bias: ArrayLike | None = None) -> dict[str, Any]:
    """Variables of a :class:`W4A8Linear` that holds ``weights``.

    Args:
      weights: :func:`jax_w4a8.pack_linear`'s. The module must have the same group size.
      bias: floating point ``[N]`` for a module with ``use_bias``; without one, the packed bias counts.

    Returns:
      ``{"w4a8": ..., "params": ...}``, to apply the module with, or to put where a larger model has it.
    """
    variables: dict[str, Any] = {COLLECTION: {"weight": _arrays(jax.tree.map(jnp.asarray, weights))}}
    if bias is not None:
        variables["params"] = {"bias": jnp.asarray(bias)}
    return variables


def moe_variables(weights: MoEWeights) -> dict[str, Any]:
    """Variables of a :class:`W4A8MoE` that holds ``weights``.

    Args:
      weights: such as :func:`jax_w4a8.checkpoint.read_moe`'s. The module's fields must say the same sizes,
        group size and optional parts.

    Returns:
      ``{"w4a8": ..., "params": ...}``.

    Raises:
      TypeError, ValueError: as :meth:`jax_w4a8.blocks.MoEWeights.check`.
    """
    weights.check()
    weights = jax.tree.map(jnp.asarray, weights)
    packed = {"experts": _expert_arrays(weights.experts), "correction_bias": weights.correction_bias}
    if weights.shared is not None:
        packed["shared"] = _expert_arrays(weights.shared)
    params = {name: getattr(weights, name) for name in ("router", "router_bias", "shared_gate")}
    return {
        COLLECTION: {name: value for name, value in packed.items() if value is not None},
        "params": {name: value for name, value in params.items() if value is not None},
    }
