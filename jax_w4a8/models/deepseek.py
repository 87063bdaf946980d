"""DeepSeek-V2 and V3 (and R1), as in Hugging Face transformers (``DeepseekV2Config``, ``DeepseekV3Config``).

Both have latent attention, dense layers first, and shared experts that nothing multiplies. They differ in how
experts are chosen: V2 by softmax, the best of the best groups; V3 by sigmoid plus a correction bias, groups
by the sum of their two best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax_w4a8.models.common import read_decoder, read_top_k, scheduled_mlps
from jax_w4a8.models.config import (
    DecoderConfig,
    DecoderNames,
    DenseConfig,
    LatentAttentionConfig,
    MixtureConfig,
    SharedConfig,
)
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.rope_fields import read_rotary, read_yarn_scale, rope_parameters
from jax_w4a8.routing import Routing

MODEL_TYPE_V2, MODEL_TYPE_V3 = "deepseek_v2", "deepseek_v3"
_SHARED = "model.layers.{layer}.mlp.shared_experts"
NAMES = DecoderNames(
    shared_gate=f"{_SHARED}.gate_proj",
    shared_up=f"{_SHARED}.up_proj",
    shared_down=f"{_SHARED}.down_proj",
)


def configure_v2(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json`` of DeepSeek-V2; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    bias = fields.flag("mlp_bias", False)
    if bias:
        raise fields.error("mlp_bias", "false")
    attention = _attention(fields, interleaved=True)
    mlps = _mlps(fields, lambda: _routing_v2(fields), correction_bias=False)
    attentions = (attention,) * len(mlps)
    return read_decoder(fields, MODEL_TYPE_V2, attentions, mlps, max_positions=2048)


def configure_v3(fields: Fields) -> DecoderConfig:
    """Reads a ``config.json`` of DeepSeek-V3; fields that it leaves out take transformers' defaults.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or asks for what isn't supported.
    """
    attention = _attention(fields, interleaved=fields.flag("rope_interleave", True))
    mlps = _mlps(fields, lambda: _routing_v3(fields), correction_bias=True)
    attentions = (attention,) * len(mlps)
    config = read_decoder(fields, MODEL_TYPE_V3, attentions, mlps, max_positions=4096)
    extra = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return dataclasses.replace(config, prediction_layers=extra)


def _attention(fields: Fields, *, interleaved: bool) -> LatentAttentionConfig:
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads {heads}")
    nope, rope = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    return LatentAttentionConfig(
        num_heads=heads,
        query_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.integer("v_head_dim", 128),
        rotary=read_rotary(fields, rope, interleaved=interleaved),
        scale=(nope + rope) ** -0.5 * _yarn_growth(fields),
        bias=fields.flag("attention_bias", False),
    )


def _yarn_growth(fields: Fields) -> float:
    """Stretched positions make logits grow; here queries and keys bear it together, hence the square."""
    rope = rope_parameters(fields)
    if not rope.get("mscale_all_dim"):
        return 1.0
    return read_yarn_scale(rope, "mscale_all_dim", rope.number("factor", 1.0)) ** 2


def _mlps(
    fields: Fields, routing: Callable[[], Routing], *, correction_bias: bool
) -> tuple[DenseConfig | MixtureConfig, ...]:
    """Dense are the first ``first_k_dense_replace`` layers, and those that ``moe_layer_freq`` leaves out."""
    first, step = fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("moe_layer_freq", 1)
    layers = range(fields.integer("num_hidden_layers"))
    sparse = [layer >= first and layer % step == 0 for layer in layers]

    def mixture() -> MixtureConfig:
        size = fields.integer("moe_intermediate_size")
        shared = fields.integer("n_shared_experts", 0, minimum=0)
        return MixtureConfig(
            _num_experts(fields),
            size,
            _checked(fields, routing),
            correction_bias=correction_bias,
            shared=SharedConfig(DenseConfig(shared * size)) if shared else None,
        )

    return scheduled_mlps(fields, sparse, mixture)


def _num_experts(fields: Fields) -> int:
    return fields.same_integer("n_routed_experts", "num_experts", "num_local_experts")


def _checked(fields: Fields, routing: Callable[[], Routing]) -> Routing:
    """A routing whose groups fit each other and the experts."""
    try:
        made = routing()
        made.check(_num_experts(fields))
    except ValueError as error:
        raise fields.error("n_group", f"such that topk_group and the experts fit it ({error})") from error
    return made


def _routing_v2(fields: Fields) -> Routing:
    _expect(fields, "scoring_func", "softmax")
    method = fields.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", "'greedy' or 'group_limited_greedy'")
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "false: implementations disagree on what true means")
    grouped = method == "group_limited_greedy"
    return Routing(
        top_k=read_top_k(fields, _num_experts(fields)),
        renormalize=False,
        num_expert_group=fields.integer("n_group") if grouped else None,
        topk_group=fields.integer("topk_group") if grouped else None,
        group_score="max",
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )


def _routing_v3(fields: Fields) -> Routing:
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    return Routing(
        top_k=read_top_k(fields, _num_experts(fields), 8),
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        num_expert_group=fields.integer("n_group", 8),
        topk_group=fields.integer("topk_group", 4),
        group_score="top2_sum",
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5),
        renormalize_epsilon=1e-20,
    )


def _expect(fields: Fields, name: str, value: str) -> None:
    if fields.get(name) not in (None, value):
        raise fields.error(name, f"absent or {value!r}")
