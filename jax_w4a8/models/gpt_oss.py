"""gpt-oss, as in Hugging Face transformers (``GptOssConfig``).

Every second layer attends over a sliding window; every head has a sink; all linear maps have biases. Gate and
up channels of its fused expert tensors alternate, and their activation is ``swigluoai``.
"""

from __future__ import annotations

from jax_w4a8.experts.base import Activation
from jax_w4a8.models.common import by_window, read_attention, read_decoder, read_num_experts, read_top_k
from jax_w4a8.models.config import DecoderConfig, DecoderNames, MixtureConfig
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.rope_fields import rope_parameters
from jax_w4a8.routing import Routing

MODEL_TYPE = "gpt_oss"
NAMES = DecoderNames(router="model.layers.{layer}.mlp.router")


def configure(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json``; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    if not rope_parameters(fields).names():
        raise fields.error("rope_parameters", "a JSON object")
    bias = fields.flag("attention_bias", True)
    attention = read_attention(
        fields, head_dim=64, default_theta=150000.0, bias=bias, output_bias=bias, sinks=True
    )
    window = fields.integer("sliding_window", 128)
    attentions = by_window(fields, attention, window, lambda layer: layer % 2 == 0)
    experts = read_num_experts(fields)
    mixture = MixtureConfig(
        experts,
        fields.integer("intermediate_size"),
        Routing(top_k=read_top_k(fields, experts, 4)),
        router_bias=True,
        expert_bias=True,
        interleaved=True,
    )
    return read_decoder(
        fields,
        MODEL_TYPE,
        attentions,
        (mixture,) * len(attentions),
        activation=_activation(fields),
        norm_epsilon=1e-5,
        max_positions=131072,
    )


def _activation(fields: Fields) -> Activation:
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.error("hidden_act", "'silu'")
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    return Activation("swigluoai", alpha, limit)
