"""What follows attention in a layer: a gated MLP, or a mixture of them."""

from __future__ import annotations

import jax
from flax import nnx

from jax_w4a8.experts.base import Activation
from jax_w4a8.experts.xla import activate
from jax_w4a8.models.layers import Linear, QuantizedOptions
from jax_w4a8.moe import moe
from jax_w4a8.nnx import PackedWeight
from jax_w4a8.routing import Routing
from jax_w4a8.weights import ExpertWeights


class DenseMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, activation: Activation, gate: Linear, up: Linear, down: Linear) -> None:
        self.activation = activation
        self.gate = gate
        self.up = up
        self.down = down

    def __call__(self, x: jax.Array) -> jax.Array:
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

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 ``[B, T, H]`` to the same; router logits are float32."""
        return moe(
            x,
            self.router(x),
            self.experts.get_value(),
            self.routing,
            activation=self.activation,
            activation_scheme=self.options.activation_scheme,
            backend=self.options.backend,
        )
