"""What follows attention in a layer: a gated MLP, or a mixture of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_w4a8.checkpoint import FloatExperts
from jax_w4a8.experts.base import Activation
from jax_w4a8.experts.xla import activate
from jax_w4a8.invariance import evenly, rounded
from jax_w4a8.models.float_experts import apply_float_experts
from jax_w4a8.models.layers import Linear, QuantizedOptions
from jax_w4a8.models.span import Span
from jax_w4a8.moe import fused_experts
from jax_w4a8.nnx import PackedWeight
from jax_w4a8.routing import Routing, route
from jax_w4a8.weights import ExpertWeights


class DenseMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, activation: Activation, gate: Linear, up: Linear, down: Linear) -> None:
        self.activation = activation
        self.gate = gate
        self.up = up
        self.down = down

    def __call__(self, x: jax.Array, span: Span) -> jax.Array:
        """float32 ``[B, T, H]`` to the same."""
        return self.down(activate(self.gate(x), self.up(x), self.activation))


class SharedExpert(nnx.Module):
    """An MLP for every token, multiplied by the sigmoid of ``gate(x)`` if there is a gate."""

    def __init__(self, mlp: DenseMLP, gate: Linear | None) -> None:
        self.mlp = mlp
        self.gate = gate

    def __call__(self, x: jax.Array, span: Span) -> jax.Array:
        """float32 ``[B, T, H]`` to the same."""
        y = self.mlp(x, span)
        return y if self.gate is None else rounded(evenly(jax.nn.sigmoid, self.gate(x)) * y)


class MoE(nnx.Module):
    """A router and its experts, and what every token passes through beside them.

    Attributes:
      experts: a :class:`PackedWeight`, or an ``nnx.Param`` of experts in floating point.
      correction_bias: an ``nnx.Param`` float ``[E]`` that takes part in the choice of experts, or None.
      shared: a :class:`SharedExpert`, or None.
    """

    def __init__(
        self,
        activation: Activation,
        routing: Routing,
        router: Linear,
        experts: ExpertWeights | FloatExperts,
        options: QuantizedOptions,
        correction_bias: jax.Array | None = None,
        shared: SharedExpert | None = None,
    ) -> None:
        self.activation = activation
        self.routing = routing
        self.router = router
        self.experts: PackedWeight[ExpertWeights] | nnx.Param[FloatExperts] = (
            PackedWeight(experts) if isinstance(experts, ExpertWeights) else nnx.Param(experts)
        )
        self.options = options
        self.correction_bias = None if correction_bias is None else nnx.Param(correction_bias)
        self.shared = shared

    def __call__(self, x: jax.Array, span: Span) -> jax.Array:
        """float32 ``[B, T, H]`` to the same; router logits are float32. Padding gets zeros, at no cost."""
        bias = None if self.correction_bias is None else self.correction_bias.get_value()
        with jax.named_scope("router"):
            weights, ids = route(self.router(x), self.routing, bias)
        ids = jnp.where(span.real[..., None], ids, -1)
        routed = self._experts(x, weights, ids)
        return routed if self.shared is None else routed + self.shared(x, span)

    def _experts(self, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        experts = self.experts.get_value()
        if self.options.float_activations or isinstance(experts, FloatExperts):
            return apply_float_experts(x, weights, ids, experts, self.activation)
        return fused_experts(
            x,
            weights,
            ids,
            experts,
            activation=self.activation,
            activation_scheme=self.options.activation_scheme,
            backend=self.options.backend,
            sharding=self.options.sharding,
        )
