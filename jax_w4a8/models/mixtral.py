"""Mixtral, as in Hugging Face transformers (``MixtralConfig``).

An expert's gate, up and down projections are called w1, w3 and w2.
"""

from __future__ import annotations

from jax_w4a8.models.common import by_window, read_attention, read_decoder, read_num_experts, read_top_k
from jax_w4a8.models.config import DecoderConfig, DecoderNames, MixtureConfig
from jax_w4a8.models.fields import Fields
from jax_w4a8.routing import Routing

MODEL_TYPE = "mixtral"
_MOE = "model.layers.{layer}.block_sparse_moe"
NAMES = DecoderNames(
    router=f"{_MOE}.gate",
    experts=f"{_MOE}.experts",
    expert_gate=f"{_MOE}.experts.{{expert}}.w1",
    expert_up=f"{_MOE}.experts.{{expert}}.w3",
    expert_down=f"{_MOE}.experts.{{expert}}.w2",
)


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    attention = read_attention(fields, default_theta=1e6)
    attentions = by_window(fields, attention, window, lambda layer: True)
    experts = read_num_experts(fields)
    routing = Routing(top_k=read_top_k(fields, experts, 2))
    mixture = MixtureConfig(experts, fields.integer("intermediate_size"), routing)
    mlps = (mixture,) * len(attentions)
    return read_decoder(fields, MODEL_TYPE, attentions, mlps, norm_epsilon=1e-5, max_positions=4096 * 32)
