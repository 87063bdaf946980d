"""Qwen3-MoE: its configuration and tensor names, as in Hugging Face transformers (``Qwen3MoeConfig``)."""

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
from jax_w4a8.models.config import DecoderConfig, DecoderNames, MixtureConfig
from jax_w4a8.models.fields import Fields
from jax_w4a8.routing import Routing

MODEL_TYPE = "qwen3_moe"
NAMES = DecoderNames()


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, bias=bias, output_bias=bias, norm="head")
    attentions = by_window(fields, attention, switched_window(fields), lambda layer: True)
    return read_decoder(fields, MODEL_TYPE, attentions, stepped_mlps(fields, lambda: _mixture(fields)))


def _mixture(fields: Fields) -> MixtureConfig:
    experts = read_num_experts(fields)
    routing = Routing(top_k=read_top_k(fields, experts, 8), renormalize=fields.flag("norm_topk_prob", False))
    return MixtureConfig(experts, fields.integer("moe_intermediate_size"), routing)
