"""What follows attention in a layer: a gated MLP, or a mixture of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_w4a8.experts.base import Activation
from jax_w4a8.models.layers import Linear, PackedWeight, QuantizedOptions
from jax_w4a8.moe import moe
from jax_w4a8.routing import Routing
from jax_w4a8.weights import ExpertWeights


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation of :class:`jax_w4a8.experts.base.Activation` on float32 arrays of one shape.

    Raises:
      ValueError: a kind that no dense MLP uses.
    """
    functions = {
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": jax.nn.gelu,
    }
    if activation.kind not in functions:
        raise ValueError(
            f"activation of a dense MLP must be one of {list(functions)}, got {activation.kind!r}"
        )
    return jnp.asarray(functions[activation.kind](gate) * up)


class DenseMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, activation: Activation, gate: Linear, up: Linear, down: Linear) -> None:
        self.activation = activation
        self.gate = gate
        self.up = up
        self.down = down

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 ``[B, T, H]`` to the same."""
        return self.down(gated(self.activation, self.gate(x), self.up(x)))


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
