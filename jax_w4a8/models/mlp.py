"""What follows attention in a layer: a gated MLP, or a mixture of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_w4a8.experts.base import Activation
from jax_w4a8.experts.xla import activate
from jax_w4a8.models.layers import Linear, PackedWeight, QuantizedOptions
from jax_w4a8.models.span import Span
from jax_w4a8.moe import fused_experts
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


class MoE(nnx.Module):
    """A router and its experts."""

    def __init__(
        self,
        activation: Activation,
        routing: Routing,
        router: Linear,
        experts: ExpertWeights,
        options: QuantizedOptions,
    ) -> None:
        self.activation = activation
        self.routing = routing
        self.router = router
        self.experts = PackedWeight(experts)
        self.options = options

    def __call__(self, x: jax.Array, span: Span) -> jax.Array:
        """float32 ``[B, T, H]`` to the same; router logits are float32. Padding gets zeros, at no cost."""
        with jax.named_scope("router"):
            weights, ids = route(self.router(x), self.routing)
        return fused_experts(
            x,
            weights,
            jnp.where(span.real[..., None], ids, -1),
            self.experts.get_value(),
            activation=self.activation,
            activation_scheme=self.options.activation_scheme,
            backend=self.options.backend,
        )
