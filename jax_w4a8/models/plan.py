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
from jax_w4a8.models.config import (
    AttentionConfig,
    DecoderConfig,
    DecoderNames,
    DenseConfig,
    LatentAttentionConfig,
    MixtureConfig,
    SharedConfig,
)


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Stored modules of one grouped-query attention."""

    config: AttentionConfig
    query: StoredLinear
    key: StoredLinear
    value: StoredLinear
    output: StoredLinear
    query_norm: StoredArray | None
    key_norm: StoredArray | None
    sinks: StoredArray | None


@dataclasses.dataclass(frozen=True)
class LatentQueryPlan:
    """Stored modules that make queries out of a latent vector."""

    down: StoredLinear
    norm: StoredArray
    up: StoredLinear


@dataclasses.dataclass(frozen=True)
class LatentAttentionPlan:
    """Stored modules of one latent attention; ``query`` is one map where queries have no latent vector."""

    config: LatentAttentionConfig
    query: LatentQueryPlan | StoredLinear
    latent_down: StoredLinear
    latent_norm: StoredArray
    latent_up: StoredLinear
    output: StoredLinear


@dataclasses.dataclass(frozen=True)
class DensePlan:
    """Stored modules of one gated MLP."""

    gate: StoredLinear
    up: StoredLinear
    down: StoredLinear


@dataclasses.dataclass(frozen=True)
class SharedPlan:
    """Stored modules of what every token passes through beside the experts."""

    mlp: DensePlan
    gate: StoredLinear | None


@dataclasses.dataclass(frozen=True)
class MoEPlan:
    """Stored modules of one MoE layer."""

    config: MixtureConfig
    router: StoredLinear
    correction_bias: StoredArray | None
    experts: StoredExperts
    shared: SharedPlan | None


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Stored modules of one layer."""

    attention_norm: StoredArray
    attention: AttentionPlan | LatentAttentionPlan
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
    layers = tuple(_LayerPlanner(checkpoint, config, names, i).layer() for i in range(config.num_layers))
    final_norm = checkpoint.array(f"{names.final_norm}.weight", (hidden,))
    head = None
    if config.tied_embeddings:
        checkpoint.tied_linear(names.head, embedding)
    else:
        head = checkpoint.linear(names.head, config.vocab_size, hidden, nonzero=True)
    for extra in range(config.prediction_layers):
        checkpoint.skip(names.layer.format(layer=config.num_layers + extra))
    checkpoint.finish()
    return DecoderPlan(embedding, layers, final_norm, head)


class _LayerPlanner:
    """Claims the tensors of one layer."""

    def __init__(
        self, checkpoint: Checkpoint, config: DecoderConfig, names: DecoderNames, layer: int
    ) -> None:
        self._checkpoint = checkpoint
        self._hidden = config.hidden_size
        self._attention_config, self._mlp_config = config.attentions[layer], config.mlps[layer]
        self._names = names
        self._layer = layer

    def layer(self) -> LayerPlan:
        names, mlp = self._names, self._mlp_config
        attention = self._attention_config
        return LayerPlan(
            attention_norm=self._norm(names.attention_norm, self._hidden),
            attention=self._latent_attention(attention)
            if isinstance(attention, LatentAttentionConfig)
            else self._attention(attention),
            mlp_norm=self._norm(names.mlp_norm, self._hidden),
            mlp=self._moe(mlp)
            if isinstance(mlp, MixtureConfig)
            else self._dense(mlp, names.gate, names.up, names.down),
        )

    def _attention(self, config: AttentionConfig) -> AttentionPlan:
        names, hidden = self._names, self._hidden
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        normed = {None: (), "head": (config.head_dim,) * 2, "projection": (queries, keys)}[config.norm]
        norms = [
            self._norm(name, size)
            for name, size in zip((names.query_norm, names.key_norm), normed, strict=False)
        ]
        query_norm, key_norm = norms or (None, None)
        return AttentionPlan(
            config,
            query=self._linear(names.query, queries, hidden, config.bias),
            key=self._linear(names.key, keys, hidden, config.bias),
            value=self._linear(names.value, keys, hidden, config.bias),
            output=self._linear(names.output, hidden, queries, config.output_bias),
            query_norm=query_norm,
            key_norm=key_norm,
            sinks=self._array(names.sinks, config.num_heads) if config.sinks else None,
        )

    def _latent_attention(self, config: LatentAttentionConfig) -> LatentAttentionPlan:
        names, hidden, heads = self._names, self._hidden, config.num_heads
        return LatentAttentionPlan(
            config,
            query=self._latent_query(config, heads * (config.nope_dim + config.rope_dim)),
            latent_down=self._linear(names.latent_down, config.rank + config.rope_dim, hidden, config.bias),
            latent_norm=self._norm(names.latent_norm, config.rank),
            latent_up=self._linear(
                names.latent_up, heads * (config.nope_dim + config.value_dim), config.rank
            ),
            output=self._linear(names.output, hidden, heads * config.value_dim, config.bias),
        )

    def _latent_query(self, config: LatentAttentionConfig, width: int) -> LatentQueryPlan | StoredLinear:
        names, rank = self._names, config.query_rank
        if rank is None:
            return self._linear(names.query, width, self._hidden)
        return LatentQueryPlan(
            down=self._linear(names.query_down, rank, self._hidden, config.bias),
            norm=self._norm(names.query_latent_norm, rank),
            up=self._linear(names.query_up, width, rank),
        )

    def _dense(self, config: DenseConfig, gate: str, up: str, down: str) -> DensePlan:
        size, hidden, bias = config.intermediate_size, self._hidden, config.bias
        return DensePlan(
            gate=self._linear(gate, size, hidden, bias),
            up=self._linear(up, size, hidden, bias),
            down=self._linear(down, hidden, size, bias),
        )

    def _moe(self, config: MixtureConfig) -> MoEPlan:
        names, experts = self._names, config.num_experts
        return MoEPlan(
            config,
            router=self._linear(names.router, experts, self._hidden, config.router_bias),
            correction_bias=self._array(names.correction_bias, experts) if config.correction_bias else None,
            experts=self._experts(config),
            shared=None if config.shared is None else self._shared(config.shared),
        )

    def _shared(self, config: SharedConfig) -> SharedPlan:
        names = self._names
        return SharedPlan(
            mlp=self._dense(config.mlp, names.shared_gate, names.shared_up, names.shared_down),
            gate=self._linear(names.shared_router, 1, self._hidden) if config.gated else None,
        )

    def _experts(self, config: MixtureConfig) -> StoredExperts:
        names = self._names

        def name(template: str) -> str:
            return template.format(layer=self._layer, expert="{expert}")

        return claim_experts(
            self._checkpoint,
            ExpertLayout(
                module=name(names.experts),
                gate=name(names.expert_gate),
                up=name(names.expert_up),
                down=name(names.expert_down),
                num_experts=config.num_experts,
                hidden_size=self._hidden,
                intermediate_size=config.intermediate_size,
                bias=config.expert_bias,
                interleaved=config.interleaved,
            ),
        )

    def _linear(self, name: str, rows: int, columns: int, bias: bool = False) -> StoredLinear:
        return self._checkpoint.linear(name.format(layer=self._layer), rows, columns, bias=bias)

    def _norm(self, name: str, size: int) -> StoredArray:
        return self._array(f"{name}.weight", size)

    def _array(self, name: str, size: int) -> StoredArray:
        return self._checkpoint.array(name.format(layer=self._layer), (size,))
