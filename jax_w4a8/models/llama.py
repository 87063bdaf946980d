"""Llama, as in Hugging Face transformers (``LlamaConfig``): dense."""

from __future__ import annotations

from jax_w4a8.models.common import dense_mlps, every_layer, read_attention, read_decoder
from jax_w4a8.models.config import DecoderConfig, DecoderNames
from jax_w4a8.models.fields import Fields

MODEL_TYPE = "llama"
NAMES = DecoderNames()


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    bias = fields.flag("attention_bias", False)
    attentions = every_layer(fields, read_attention(fields, bias=bias, output_bias=bias))
    mlps = dense_mlps(fields, bias=fields.flag("mlp_bias", False))
    return read_decoder(fields, MODEL_TYPE, attentions, mlps, max_positions=2048)
