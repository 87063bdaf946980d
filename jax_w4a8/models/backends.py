"""Asks the oracle which backend each layer of a stored model gets."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_w4a8.checkpoint import Scheme
from jax_w4a8.checkpoint.tensors import DTYPES
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.plan import DecoderPlan, MoEPlan
from jax_w4a8.oracle import (
    MoEConfig,
    W4A8Int8MoeBackend,
    resolve_backend,
    select_w4a8_int8_moe_backend,
)
from jax_w4a8.quantization import GroupShape, QuantKey, weight_key
from jax_w4a8.sharding import ExpertSharding


@dataclasses.dataclass(frozen=True)
class LayerQuestion:
    """What the oracle is asked about an MoE layer.

    Attributes:
      config: the layer.
      weight_key, activation_key: schemes of weights and activations as the checkpoint declares them.
    """

    config: MoEConfig
    weight_key: QuantKey
    activation_key: QuantKey

    def choose(self) -> W4A8Int8MoeBackend:
        """The backend that the layer gets.

        Raises:
          ValueError, NotImplementedError: as :func:`select_w4a8_int8_moe_backend`.
        """
        return select_w4a8_int8_moe_backend(self.config, self.weight_key, self.activation_key)[0]


def ask_about(
    config: DecoderConfig,
    plan: MoEPlan,
    activation_scheme: str,
    backend: str,
    sharding: ExpertSharding | None = None,
) -> LayerQuestion | None:
    """The question about one layer of a stored model; None if its experts are in floating point."""
    first, scheme = plan.experts.gates[0], plan.experts.scheme
    if scheme is None:
        return None
    layer = MoEConfig(
        num_experts=plan.config.num_experts,
        top_k=plan.config.routing.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=plan.config.intermediate_size,
        activation=config.activation,
        activation_scheme=activation_scheme,
        routing=plan.config.routing,
        ep_size=1 if sharding is None else sharding.ep_size,
        tp_size=1 if sharding is None else sharding.tp_size,
        moe_backend=backend,
    )
    return LayerQuestion(layer, stored_weight_key(scheme, first.scale_dtype), _tokens_key(scheme))


def stored_weight_key(scheme: Scheme, scale_dtype: str | None) -> QuantKey:
    """The weights' scheme in the oracle's terms, from safetensors' name of the scales' dtype."""
    return weight_key(scheme.group_size, DTYPES[scale_dtype or "F32"])


def _tokens_key(scheme: Scheme) -> QuantKey:
    return QuantKey(
        jnp.dtype(jnp.int8),
        jnp.dtype(jnp.float32),
        GroupShape(1, -1),
        symmetric=scheme.symmetric_activations,
    )


def check_backend(
    config: DecoderConfig,
    plan: DecoderPlan,
    activation_scheme: str,
    backend: str,
    sharding: ExpertSharding | None = None,
) -> None:
    """Raises ValueError or NotImplementedError, with the reason, if a layer can't run here as asked."""
    resolve_backend(backend)
    for layer in plan.layers:
        if isinstance(layer.mlp, MoEPlan):
            question = ask_about(config, layer.mlp, activation_scheme, backend, sharding)
            if question is not None:
                question.choose()
