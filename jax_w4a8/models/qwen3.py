"""Qwen3, as in Hugging Face transformers (``Qwen3Config``): dense."""

from __future__ import annotations

from jax_w4a8.models.common import by_window, dense_mlps, read_attention, read_decoder, switched_window
from jax_w4a8.models.config import DecoderConfig, DecoderNames
from jax_w4a8.models.fields import Fields

MODEL_TYPE = "qwen3"
NAMES = DecoderNames()


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    bias, lower = fields.flag("attention_bias", False), fields.integer("max_window_layers", 28, minimum=0)
    attention = read_attention(fields, head_dim=128, bias=bias, output_bias=bias, norm="head")
    attentions = by_window(fields, attention, switched_window(fields), lambda layer: layer >= lower)
    return read_decoder(fields, MODEL_TYPE, attentions, dense_mlps(fields))
