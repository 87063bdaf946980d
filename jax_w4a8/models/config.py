"""The sizes and switches of a decoder, whatever family it comes from."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_w4a8.experts.base import Activation
from jax_w4a8.models.rotary import RotaryConfig
from jax_w4a8.routing import Routing


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention.

    Attributes:
      num_heads, num_kv_heads, head_dim: query heads share key and value heads in equal groups.
      rotary: positions.
      bias: whether the projections of queries, keys and values have one.
      output_bias: whether the output projection has one.
      norm: queries and keys are normalised ``head`` by head, over the whole ``projection``, or not (None).
      clip: queries, keys and values are clipped to [-clip, clip]; None clips nothing.
      window: positions that a token sees, its own included; None for all before it.
      sinks: whether every head has a learnt logit that takes part in the softmax and adds nothing.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    bias: bool = False
    output_bias: bool = False
    norm: Literal["head", "projection"] | None = None
    clip: float | None = None
    window: int | None = None
    sinks: bool = False

    @property
    def scale(self) -> float:
        """Multiplies the scores."""
        return float(self.head_dim**-0.5)


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2).

    Attributes:
      num_heads: of queries, keys and values alike.
      query_rank: width of the queries' latent vector; None when queries are projected directly.
      rank: width of the latent vector that keys and values are made of.
      nope_dim, rope_dim: widths of the parts of a query or key without and with positions.
      value_dim: width of a value.
      rotary: positions.
      scale: multiplies the scores.
      bias: whether the projections from and to the hidden size (latent vectors, output) have one.
    """

    num_heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rotary: RotaryConfig
    scale: float
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A gated MLP.

    Attributes:
      intermediate_size: its width.
      bias: whether its projections have one.
    """

    intermediate_size: int
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """An MLP beside the experts that every token passes through.

    Attributes:
      mlp: the MLP.
      gated: whether its output is multiplied by the sigmoid of a learnt map of the token to a number.
    """

    mlp: DenseConfig
    gated: bool = False


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """A mixture of gated MLPs.

    Attributes:
      num_experts: how many.
      intermediate_size: width of each.
      routing: how a token chooses among them.
      router_bias, expert_bias: whether the router, and the experts' projections, have one.
      correction_bias: whether a bias takes part in the choice of experts, and in no weight.
      interleaved: whether gate and up channels of fused expert tensors alternate.
      shared: an MLP for every token, or None. The routed scaling factor doesn't touch it.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    router_bias: bool = False
    expert_bias: bool = False
    correction_bias: bool = False
    interleaved: bool = False
    shared: SharedConfig | None = None


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder of attention and MLP layers. Static under ``jit``.

    Attributes:
      model_type: the family, by its Hugging Face name.
      vocab_size, hidden_size: sizes of the embedding.
      attentions, mlps: each layer's two halves.
      activation: of gated MLPs and experts.
      norm_epsilon: of all norms.
      tied_embeddings: whether the output head is the embedding.
      max_positions: tokens that a sequence may have.
      eos_token_ids: ids that end a text.
      prediction_layers: further layers that a checkpoint may hold, for multi-token prediction; not loaded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    attentions: tuple[AttentionConfig | LatentAttentionConfig, ...]
    mlps: tuple[DenseConfig | MixtureConfig, ...]
    activation: Activation
    norm_epsilon: float
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()
    prediction_layers: int = 0

    @property
    def num_layers(self) -> int:
        """Layers, dense and MoE."""
        return len(self.mlps)


_LAYER = "model.layers.{layer}"
_ATTENTION = f"{_LAYER}.self_attn"


@dataclasses.dataclass(frozen=True)
class DecoderNames:
    """What a family calls its modules; ``{layer}`` and ``{expert}`` are filled in.

    Attributes:
      embedding, final_norm, head: once per model.
      layer: all modules of a layer.
      attention_norm, mlp_norm: norms before attention and MLP.
      query, key, value, output: projections of attention.
      query_norm, key_norm: norms of queries and keys.
      sinks: the tensor of the heads' sinks.
      query_down, query_latent_norm, query_up: latent queries.
      latent_down, latent_norm, latent_up: latent keys and values.
      gate, up, down: projections of a dense MLP.
      router: of an MoE layer.
      correction_bias: the tensor of the router's correction bias.
      shared_gate, shared_up, shared_down: projections of the shared expert.
      shared_router: the map whose sigmoid multiplies the shared expert.
      experts: what an MoE layer's experts are called together.
      expert_gate, expert_up, expert_down: projections of an expert.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = _LAYER
    attention_norm: str = f"{_LAYER}.input_layernorm"
    mlp_norm: str = f"{_LAYER}.post_attention_layernorm"
    query: str = f"{_ATTENTION}.q_proj"
    key: str = f"{_ATTENTION}.k_proj"
    value: str = f"{_ATTENTION}.v_proj"
    output: str = f"{_ATTENTION}.o_proj"
    query_norm: str = f"{_ATTENTION}.q_norm"
    key_norm: str = f"{_ATTENTION}.k_norm"
    sinks: str = f"{_ATTENTION}.sinks"
    query_down: str = f"{_ATTENTION}.q_a_proj"
    query_latent_norm: str = f"{_ATTENTION}.q_a_layernorm"
    query_up: str = f"{_ATTENTION}.q_b_proj"
    latent_down: str = f"{_ATTENTION}.kv_a_proj_with_mqa"
    latent_norm: str = f"{_ATTENTION}.kv_a_layernorm"
    latent_up: str = f"{_ATTENTION}.kv_b_proj"
    gate: str = f"{_LAYER}.mlp.gate_proj"
    up: str = f"{_LAYER}.mlp.up_proj"
    down: str = f"{_LAYER}.mlp.down_proj"
    router: str = f"{_LAYER}.mlp.gate"
    correction_bias: str = f"{_LAYER}.mlp.gate.e_score_correction_bias"
    shared_gate: str = f"{_LAYER}.mlp.shared_expert.gate_proj"
    shared_up: str = f"{_LAYER}.mlp.shared_expert.up_proj"
    shared_down: str = f"{_LAYER}.mlp.shared_expert.down_proj"
    shared_router: str = f"{_LAYER}.mlp.shared_expert_gate"
    experts: str = f"{_LAYER}.mlp.experts"
    expert_gate: str = f"{_LAYER}.mlp.experts.{{expert}}.gate_proj"
    expert_up: str = f"{_LAYER}.mlp.experts.{{expert}}.up_proj"
    expert_down: str = f"{_LAYER}.mlp.experts.{{expert}}.down_proj"
