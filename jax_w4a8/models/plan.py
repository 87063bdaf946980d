"""Which stored modules a decoder is made of: everything checked by the files' headers, nothing large read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax_w4a8.checkpoint import (
    Checkpoint,
    ExpertLayout,
    StoredArray,
    StoredExperts,
    StoredLinear,
    claim_experts,
)
from jax_w4a8.models.config import DecoderConfig, DecoderNames, DenseConfig, MixtureConfig


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Stored modules of one attention."""

    query: StoredLinear
    key: StoredLinear
    value: StoredLinear
    output: StoredLinear
    query_norm: StoredArray | None
    key_norm: StoredArray | None


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """Stored modules of one gated MLP."""

    gate: StoredLinear
    up: StoredLinear
    down: StoredLinear


@dataclasses.dataclass(frozen=True)
class MoEPlan:
    """Stored modules of one MoE layer."""

    config: MixtureConfig
    router: StoredLinear
    experts: StoredExperts


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Stored modules of one layer."""

    attention_norm: StoredArray
    attention: AttentionPlan
    mlp_norm: StoredArray
    mlp: DensePlan | MoEPlan


@dataclasses.dataclass(frozen=True)
class DecoderPlan:
    """Stored modules of a decoder; ``head`` is None when the embedding serves as one."""

    embedding: StoredArray
    layers: tuple[LayerPlan, ...]
    final_norm: StoredArray
    head: StoredLinear | None

    def modules(self) -> Iterator[StoredArray | StoredLinear | StoredExperts]:
        """All stored modules, in the order in which a model reads them."""
        yield from _modules(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(module.nbytes for module in self.modules())


def _modules(value: object) -> Iterator[StoredArray | StoredLinear | StoredExperts]:
    if isinstance(value, StoredArray | StoredLinear | StoredExperts):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _modules(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _modules(getattr(value, field.name))


def plan_decoder(checkpoint: Checkpoint, config: DecoderConfig, names: DecoderNames) -> DecoderPlan:
    """Claims every tensor of a decoder.

    Raises:
      CheckpointError: a tensor is missing, left over, or of the wrong shape or dtype.
    """
    hidden = config.hidden_size
    embedding = checkpoint.embedding(names.embedding, config.vocab_size, hidden)
    layers = tuple(_plan_layer(checkpoint, config, names, i) for i in range(config.num_layers))
    final_norm = checkpoint.array(f"{names.final_norm}.weight", (hidden,))
    head = None
    if config.tied_embeddings:
        checkpoint.tied_linear(names.head, embedding)
    else:
        head = checkpoint.linear(names.head, config.vocab_size, hidden, nonzero=True)
    checkpoint.finish()
    return DecoderPlan(embedding, layers, final_norm, head)


def _plan_layer(checkpoint: Checkpoint, config: DecoderConfig, names: DecoderNames, layer: int) -> LayerPlan:
    def norm(name: str) -> StoredArray:
        return checkpoint.array(f"{name.format(layer=layer)}.weight", (config.hidden_size,))

    mlp = config.mlps[layer]
    return LayerPlan(
        attention_norm=norm(names.attention_norm),
        attention=_plan_attention(checkpoint, config, names, layer),
        mlp_norm=norm(names.mlp_norm),
        mlp=_plan_moe(checkpoint, config.hidden_size, mlp, names, layer)
        if isinstance(mlp, MixtureConfig)
        else _plan_dense(checkpoint, config.hidden_size, mlp, names, layer),
    )


def _plan_attention(
    checkpoint: Checkpoint, config: DecoderConfig, names: DecoderNames, layer: int
) -> AttentionPlan:
    def linear(name: str, rows: int, columns: int) -> StoredLinear:
        return checkpoint.linear(name.format(layer=layer), rows, columns, bias=config.attention_bias)

    def norm(name: str) -> StoredArray | None:
        if not config.query_key_norm:
            return None
        return checkpoint.array(f"{name.format(layer=layer)}.weight", (config.head_dim,))

    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return AttentionPlan(
        query=linear(names.query, queries, config.hidden_size),
        key=linear(names.key, keys, config.hidden_size),
        value=linear(names.value, keys, config.hidden_size),
        output=linear(names.output, config.hidden_size, queries),
        query_norm=norm(names.query_norm),
        key_norm=norm(names.key_norm),
    )


def _plan_dense(
    checkpoint: Checkpoint, hidden: int, mlp: DenseConfig, names: DecoderNames, layer: int
) -> DensePlan:
    size = mlp.intermediate_size
    return DensePlan(
        gate=checkpoint.linear(names.gate.format(layer=layer), size, hidden),
        up=checkpoint.linear(names.up.format(layer=layer), size, hidden),
        down=checkpoint.linear(names.down.format(layer=layer), hidden, size),
    )


def _plan_moe(
    checkpoint: Checkpoint, hidden: int, mlp: MixtureConfig, names: DecoderNames, layer: int
) -> MoEPlan:
    return MoEPlan(
        config=mlp,
        router=checkpoint.linear(names.router.format(layer=layer), mlp.num_experts, hidden),
        experts=claim_experts(
            checkpoint,
            ExpertLayout(
                module=names.experts.format(layer=layer),
                gate=names.expert_gate.format(layer=layer, expert="{expert}"),
                up=names.expert_up.format(layer=layer, expert="{expert}"),
                down=names.expert_down.format(layer=layer, expert="{expert}"),
                num_experts=mlp.num_experts,
                hidden_size=hidden,
                intermediate_size=mlp.intermediate_size,
            ),
        ),
    )
