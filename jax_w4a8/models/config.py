"""The sizes and switches of a decoder, whatever family it comes from."""

from __future__ import annotations

import dataclasses

from jax_w4a8.experts.base import Activation
from jax_w4a8.routing import Routing


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """A gated MLP.

    Attributes:
      intermediate_size: its width.
    """

    intermediate_size: int


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """A mixture of gated MLPs.

    Attributes:
      num_experts: how many.
      intermediate_size: width of each.
      routing: how a token chooses among them.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder of attention and MLP layers. Static under ``jit``.

    Attributes:
      model_type: the family, by its Hugging Face name.
      vocab_size, hidden_size: sizes of the embedding.
      num_heads, num_kv_heads, head_dim: attention; query heads share key and value heads in equal groups.
      mlps: each layer's MLP, and so the number of layers.
      activation: of gated MLPs and experts.
      norm_epsilon: of all norms.
      rope_theta: base of the rotary frequencies.
      attention_bias: whether the four projections of attention have a bias.
      query_key_norm: whether queries and keys are normalised per head.
      tied_embeddings: whether the output head is the embedding.
      max_positions: tokens that a sequence may have.
      eos_token_ids: ids that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlps: tuple[DenseConfig | MixtureConfig, ...]
    activation: Activation
    norm_epsilon: float
    rope_theta: float
    attention_bias: bool
    query_key_norm: bool
    tied_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers, dense and MoE."""
        return len(self.mlps)


@dataclasses.dataclass(frozen=True)
class DecoderNames:
    """What a family calls its modules; ``{layer}`` and ``{expert}`` are filled in.

    Attributes:
      embedding, final_norm, head: once per model.
      attention_norm, mlp_norm: norms before attention and MLP.
      query, key, value, output: projections of attention.
      query_norm, key_norm: norms of queries and keys.
      gate, up, down: projections of a dense MLP.
      router: of an MoE layer.
      experts: what an MoE layer's experts are called together.
      expert_gate, expert_up, expert_down: projections of an expert.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "model.layers.{layer}.input_layernorm"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    query: str = "model.layers.{layer}.self_attn.q_proj"
    key: str = "model.layers.{layer}.self_attn.k_proj"
    value: str = "model.layers.{layer}.self_attn.v_proj"
    output: str = "model.layers.{layer}.self_attn.o_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    router: str = "model.layers.{layer}.mlp.gate"
    experts: str = "model.layers.{layer}.mlp.experts"
    expert_gate: str = "model.layers.{layer}.mlp.experts.{expert}.gate_proj"
    expert_up: str = "model.layers.{layer}.mlp.experts.{expert}.up_proj"
    expert_down: str = "model.layers.{layer}.mlp.experts.{expert}.down_proj"
