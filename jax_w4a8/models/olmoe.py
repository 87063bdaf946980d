"""OLMoE, as in Hugging Face transformers (``OlmoeConfig``).

Queries and keys are normalised over the whole projection, then all three are clipped if ``clip_qkv`` is set.
"""

from __future__ import annotations

from jax_w4a8.models.common import (
    every_layer,
    read_attention,
    read_decoder,
    read_num_experts,
    read_top_k,
)
from jax_w4a8.models.config import DecoderConfig, DecoderNames, MixtureConfig
from jax_w4a8.models.fields import Fields
from jax_w4a8.routing import Routing

MODEL_TYPE = "olmoe"
NAMES = DecoderNames()


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    bias = fields.flag("attention_bias", False)
    clip = fields.optional_number("clip_qkv")
    attention = read_attention(fields, bias=bias, output_bias=bias, norm="projection", clip=clip)
    attentions = every_layer(fields, attention)
    experts = read_num_experts(fields)
    routing = Routing(top_k=read_top_k(fields, experts, 8), renormalize=fields.flag("norm_topk_prob", False))
    mixture = MixtureConfig(experts, fields.integer("intermediate_size"), routing)
    mlps = (mixture,) * len(attentions)
    return read_decoder(fields, MODEL_TYPE, attentions, mlps, norm_epsilon=1e-5, max_positions=4096)
