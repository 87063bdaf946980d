"""Qwen2-MoE and Qwen1.5-MoE, as in Hugging Face transformers (``Qwen2MoeConfig``).

A shared expert stands beside the routed ones, multiplied by the sigmoid of its own one-row map.
"""

from __future__ import annotations

from jax_w4a8.models.common import (
    by_window,
    read_attention,
    read_decoder,
    read_num_experts,
    read_top_k,
    stepped_mlps,
    switched_window,
)
from jax_w4a8.models.config import DecoderConfig, DecoderNames, DenseConfig, MixtureConfig, SharedConfig
from jax_w4a8.models.fields import Fields
from jax_w4a8.routing import Routing

MODEL_TYPE = "qwen2_moe"
NAMES = DecoderNames()


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    attention = read_attention(fields, bias=fields.flag("qkv_bias", True))
    upper = fields.integer("max_window_layers", 28, minimum=0)
    attentions = by_window(
        fields, attention, switched_window(fields), lambda layer: layer % 2 == 0 and layer < upper
    )
    return read_decoder(fields, MODEL_TYPE, attentions, stepped_mlps(fields, lambda: _mixture(fields)))


def _mixture(fields: Fields) -> MixtureConfig:
    experts = read_num_experts(fields)
    routing = Routing(top_k=read_top_k(fields, experts, 4), renormalize=fields.flag("norm_topk_prob", False))
    shared = SharedConfig(DenseConfig(fields.integer("shared_expert_intermediate_size")), gated=True)
    return MixtureConfig(experts, fields.integer("moe_intermediate_size"), routing, shared=shared)
