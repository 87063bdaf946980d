"""Qwen3-MoE: its configuration and tensor names, as in Hugging Face transformers (``Qwen3MoeConfig``)."""

from __future__ import annotations

from jax_w4a8.models.config import DecoderConfig, DecoderNames, DenseConfig, MixtureConfig
from jax_w4a8.models.fields import Fields
from jax_w4a8.routing import Routing

MODEL_TYPE = "qwen3_moe"
NAMES = DecoderNames()


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    _refuse_sliding_window(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", "even")
    return DecoderConfig(
        model_type=MODEL_TYPE,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlps=_mlps(fields),
        activation=fields.activation("hidden_act"),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        rope_theta=fields.rope_theta(10000.0),
        attention_bias=fields.flag("attention_bias", False),
        query_key_norm=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=fields.integer("max_position_embeddings", 32768),
        eos_token_ids=fields.integers("eos_token_id"),
    )


def _mlps(fields: Fields) -> tuple[DenseConfig | MixtureConfig, ...]:
    """Layers whose number + 1 is a multiple of ``decoder_sparse_step`` are MoE, unless listed as dense."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense_layers = fields.integers("mlp_only_layers")
    sparse = [i not in dense_layers and (i + 1) % step == 0 for i in range(layers)]
    moe = _moe(fields) if any(sparse) else None
    dense = None if all(sparse) else DenseConfig(fields.integer("intermediate_size"))
    mlps = [moe if is_sparse else dense for is_sparse in sparse]
    return tuple(mlp for mlp in mlps if mlp is not None)


def _moe(fields: Fields) -> MixtureConfig:
    experts = fields.same_integer("num_experts", "num_local_experts")
    top_k = fields.integer("num_experts_per_tok", 8)
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"at most the number of experts, {experts}")
    routing = Routing(top_k=top_k, renormalize=fields.flag("norm_topk_prob", False))
    return MixtureConfig(experts, fields.integer("moe_intermediate_size"), routing)


def _refuse_sliding_window(fields: Fields) -> None:
    window = fields.get("sliding_window")
    if fields.flag("use_sliding_window", False) and window is not None:
        raise fields.error("sliding_window", "null or switched off by use_sliding_window")
    kinds = fields.get("layer_types")
    if kinds is not None and any(kind != "full_attention" for kind in kinds):
        raise fields.error("layer_types", "null or 'full_attention' for every layer")
