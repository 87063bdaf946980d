"""From ``config.json`` to a decoder's configuration: published models, schedules, rotary positions, refusals.

Names in brackets, as in [B18], are those of the project's list of known faults.
"""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.experts.base import Activation
from jax_w4a8.models import FAMILIES, DecoderConfig
from jax_w4a8.models.config import AttentionConfig, DenseConfig, LatentAttentionConfig, MixtureConfig
from jax_w4a8.models.families import find_family
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.rope_fields import read_rotary
from jax_w4a8.models.span import Span
from jax_w4a8.routing import Routing

from .checkpoints import DATA
from .family_configs import PUBLISHED


def configure(fields: dict) -> DecoderConfig:
    return find_family(fields["model_type"], "config.json").configure(Fields(fields, "config.json"))


def changed(name: str, **fields: object) -> dict:
    return PUBLISHED[name] | fields


# ---------------------------------------------------------------------------------------------------------
# Published models.

ROUTINGS = {  # [B1] [B2] [B20]
    "Qwen3-30B-A3B": (128, 768, Routing(8)),
    "Qwen2-57B-A14B": (64, 2560, Routing(8, renormalize=False)),
    "Qwen1.5-MoE-A2.7B": (60, 1408, Routing(4, renormalize=False)),
    "Mixtral-8x7B": (8, 14336, Routing(2)),
    "OLMoE-1B-7B": (64, 1024, Routing(8, renormalize=False)),
    "DeepSeek-V2-Lite": (64, 1408, Routing(6, renormalize=False, group_score="max")),
    "DeepSeek-V2": (160, 1536, Routing(6, "softmax", False, 8, 3, "max", 16.0)),
    "DeepSeek-V3": (256, 2048, Routing(8, "sigmoid", True, 8, 4, "top2_sum", 2.5, 1e-20)),
    "gpt-oss-20b": (32, 2880, Routing(4)),
}
#: Heads, key-value heads, width, bias of queries, of the output, norm.
ATTENTIONS = {
    "Qwen3-30B-A3B": (32, 4, 128, False, False, "head"),
    "Qwen2-57B-A14B": (28, 4, 128, True, False, None),
    "Qwen1.5-MoE-A2.7B": (16, 16, 128, True, False, None),
    "Mixtral-8x7B": (32, 8, 128, False, False, None),
    "OLMoE-1B-7B": (16, 16, 128, False, False, "projection"),
    "gpt-oss-20b": (64, 8, 64, True, True, None),
    "Qwen3-8B": (32, 8, 128, False, False, "head"),
    "Qwen2.5-7B": (28, 4, 128, True, False, None),
    "Llama-3.1-8B": (32, 8, 128, False, False, None),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_and_routing_of_published_models(name):
    mixture = configure(PUBLISHED[name]).mlps[-1]
    assert isinstance(mixture, MixtureConfig)
    assert (mixture.num_experts, mixture.intermediate_size, mixture.routing) == ROUTINGS[name]
    mixture.routing.check(mixture.num_experts)
    assert mixture.correction_bias == (name == "DeepSeek-V3")
    assert mixture.router_bias == mixture.expert_bias == mixture.interleaved == (name == "gpt-oss-20b")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_published_models(name):
    config = configure(PUBLISHED[name])
    for attention in config.attentions:
        assert isinstance(attention, AttentionConfig)
        sizes = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        assert (*sizes, attention.bias, attention.output_bias, attention.norm) == ATTENTIONS[name]
        assert attention.scale == attention.head_dim**-0.5
        assert attention.clip is None
        assert attention.sinks == (name == "gpt-oss-20b")
    assert config.num_layers == len(config.attentions) == PUBLISHED[name]["num_hidden_layers"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_published_models(name):
    fields, config = PUBLISHED[name], configure(PUBLISHED[name])
    assert config.vocab_size == fields["vocab_size"]
    assert config.norm_epsilon == fields["rms_norm_eps"]
    assert config.max_positions == fields["max_position_embeddings"]
    assert not config.tied_embeddings
    assert all(attention.rotary.theta == fields["rope_theta"] for attention in config.attentions)
    swiglu = Activation("swigluoai", 1.702, 7.0)
    assert config.activation == (swiglu if name == "gpt-oss-20b" else Activation("silu"))


def test_shared_experts_of_published_models():  # [B17]
    shared = {name: configure(PUBLISHED[name]).mlps[-1].shared for name in ROUTINGS}
    found = {name: (s.mlp.intermediate_size, s.gated) for name, s in shared.items() if s is not None}
    assert found == {
        "Qwen2-57B-A14B": (20480, True),
        "Qwen1.5-MoE-A2.7B": (5632, True),
        "DeepSeek-V2-Lite": (2816, False),
        "DeepSeek-V2": (3072, False),
        "DeepSeek-V3": (2048, False),
    }


@pytest.mark.parametrize(
    ("name", "heads", "query_rank", "growth"),
    [
        ("DeepSeek-V2-Lite", 16, None, (0.1 * 0.707 * math.log(40) + 1) ** 2),
        ("DeepSeek-V2", 128, 1536, (0.1 * 0.707 * math.log(40) + 1) ** 2),
        ("DeepSeek-V3", 128, 1536, (0.1 * math.log(40) + 1) ** 2),
    ],
)
def test_latent_attention_of_published_models(name, heads, query_rank, growth):
    attention = configure(PUBLISHED[name]).attentions[0]
    assert isinstance(attention, LatentAttentionConfig)
    assert (attention.num_heads, attention.query_rank, attention.rank) == (heads, query_rank, 512)
    assert (attention.nope_dim, attention.rope_dim, attention.value_dim) == (128, 64, 128)
    assert attention.rotary.interleaved
    assert attention.rotary.dim == 64
    assert attention.rotary.attention_factor == 1
    assert attention.scale == pytest.approx(192**-0.5 * growth)


def test_end_of_text_and_prediction_layers():
    assert configure(PUBLISHED["Llama-3.1-8B"]).eos_token_ids == (128001, 128008, 128009)
    assert configure(PUBLISHED["gpt-oss-20b"]).eos_token_ids == (200002,)
    assert configure(PUBLISHED["DeepSeek-V3"]).prediction_layers == 1
    assert configure(PUBLISHED["DeepSeek-V2"]).prediction_layers == 0


# ---------------------------------------------------------------------------------------------------------
# Schedules.


@pytest.mark.parametrize(  # [B18]
    ("fields", "sparse"),
    [
        (changed("Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[3]), {1}),
        (changed("Qwen1.5-MoE-A2.7B", decoder_sparse_step=2, mlp_only_layers=[3]), {1}),
        (changed("Qwen2-57B-A14B", mlp_only_layers=[0, 2]), {1, 3}),
        (changed("Qwen3-30B-A3B", decoder_sparse_step=3), {2}),
        (changed("DeepSeek-V3", first_k_dense_replace=3), {3}),
        (changed("DeepSeek-V2", first_k_dense_replace=0), {0, 1, 2, 3}),
        (changed("DeepSeek-V2", first_k_dense_replace=1, moe_layer_freq=2), {2}),
        (changed("DeepSeek-V3", first_k_dense_replace=4), set()),
        (changed("Mixtral-8x7B"), {0, 1, 2, 3}),
        (changed("Llama-3.1-8B"), set()),
    ],
)
def test_dense_and_moe_layers(fields, sparse):
    mlps = configure(fields | {"num_hidden_layers": 4}).mlps
    assert {i for i, mlp in enumerate(mlps) if isinstance(mlp, MixtureConfig)} == sparse
    dense = [mlp for mlp in mlps if isinstance(mlp, DenseConfig)]
    assert all(mlp.intermediate_size == fields["intermediate_size"] for mlp in dense)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (changed("gpt-oss-20b", layer_types=None), [128, None, 128, None]),
        (
            changed("gpt-oss-20b", layer_types=["full_attention"] * 3 + ["sliding_attention"]),
            [None] * 3 + [128],
        ),
        (changed("Mixtral-8x7B", sliding_window=4096), [4096] * 4),
        (changed("Qwen3-30B-A3B", use_sliding_window=True, sliding_window=512), [512] * 4),
        (
            changed("Qwen3-8B", use_sliding_window=True, sliding_window=7, max_window_layers=3),
            [None] * 3 + [7],
        ),
        (changed("Qwen2.5-7B", use_sliding_window=True, max_window_layers=3), [None] * 3 + [131072]),
        (changed("Qwen2.5-7B"), [None] * 4),
        (
            changed("Qwen2-57B-A14B", use_sliding_window=True, sliding_window=9, max_window_layers=2),
            [9, None, None, None],
        ),
    ],
)
def test_sliding_windows(fields, windows):
    attentions = configure(fields | {"num_hidden_layers": 4}).attentions
    assert [attention.window for attention in attentions] == windows


# ---------------------------------------------------------------------------------------------------------
# Rotary positions.

ROPES = np.load(DATA / "rope.npz")
PARAMETERS = json.loads(str(ROPES["parameters"]))


def rotary(parameters, *, older=False, **top):
    if older:
        parameters = dict(parameters)
        top |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
        parameters["type"] = parameters.pop("rope_type")
    else:
        top |= {"rope_parameters": parameters}
    return read_rotary(Fields({"max_position_embeddings": 8192} | top, "config.json"), 64)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", [n for n in PARAMETERS if n != "dynamic"])
def test_frequencies_are_those_of_transformers(name, older):
    config = rotary(PARAMETERS[name], older=older)
    np.testing.assert_allclose(config.frequencies(), ROPES[name][0], rtol=2e-6)
    assert config.attention_factor == pytest.approx(float(ROPES[f"{name}_attention_factor"]), rel=1e-6)


def test_dynamic_frequencies_follow_each_row_s_length():
    """Cosines at each row's last position, at the lengths that transformers was asked for."""
    config = rotary(PARAMETERS["dynamic"])
    lengths = ROPES["dynamic_lengths"]
    rows = len(lengths)
    span = Span(jnp.asarray(lengths - 1, jnp.int32), jnp.ones(rows, jnp.int32), 1)
    cosines, sines = (np.asarray(part)[:, 0] for part in config.table(span))
    angles = (lengths - 1)[:, None].astype(np.float64) * ROPES["dynamic"]
    np.testing.assert_allclose(cosines, np.cos(angles), atol=0.02)  # float32 angles of 20 000 radians
    np.testing.assert_allclose(sines, np.sin(angles), atol=0.02)
    assert not np.allclose(ROPES["dynamic"][0], ROPES["dynamic"][3], rtol=0.01)
    assert config.positions == 4 * 8192


def test_stretched_positions_may_be_used():
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert configure(changed("Qwen3-8B", rope_scaling=stretched)).max_positions == 131072
    dynamic = {"type": "dynamic", "factor": 2.0}
    assert configure(changed("Llama-3.1-8B", rope_scaling=dynamic)).max_positions == 262144


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            r"rope_scaling.type must be one of .*yarn",
        ),
        ({"rope_parameters": {"rope_type": "mrope"}}, r"rope_parameters.rope_type must be one of .*'mrope'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "full_attention must be a plain value",
        ),
        ({"rope_parameters": [1]}, "rope_parameters must be a JSON object"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor must be",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope_scaling.factor must be at least 1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "high_freq_factor": 1.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1e5}},
            "attention_factor must be a positive number of at most 10000, got 100000",
        ),
    ],
)
def test_rotary_positions_are_refused_by_name(fields, message):
    with pytest.raises(CheckpointError, match=message):
        configure(changed("Llama-3.1-8B", rope_scaling=None) | fields)


# ---------------------------------------------------------------------------------------------------------
# Refusals.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed("DeepSeek-V2", norm_topk_prob=True), "norm_topk_prob must be false"),
        (changed("DeepSeek-V2", scoring_func="sigmoid"), "scoring_func must be absent or 'softmax'"),
        (changed("DeepSeek-V2", topk_method="noaux_tc"), "topk_method must be 'greedy' or"),
        (changed("DeepSeek-V3", topk_method="greedy"), "topk_method must be absent or 'noaux_tc'"),
        (
            changed("DeepSeek-V3", num_key_value_heads=8),
            "num_key_value_heads must be num_attention_heads 128",
        ),
        (changed("DeepSeek-V3", n_routed_experts=None), "n_routed_experts .* is missing"),
        (changed("DeepSeek-V3", num_experts_per_tok=257), "num_experts_per_tok must be at most .* 256"),
        (
            changed("DeepSeek-V3", n_group=3),
            "n_group must be such that topk_group and the experts fit it .* got 3",
        ),
        (changed("gpt-oss-20b", hidden_act="gelu"), "hidden_act must be 'silu'"),
        (changed("gpt-oss-20b", rope_scaling=None), "rope_parameters must be a JSON object"),
        (
            changed("gpt-oss-20b", layer_types=["full_attention"]),
            "layer_types must be null or a kind for each of 24",
        ),
        (
            changed("gpt-oss-20b", layer_types=["linear_attention"] * 24),
            "layer_types must be null or 'full_attention'",
        ),
        (changed("OLMoE-1B-7B", clip_qkv=-1), "clip_qkv must be a positive number"),
        (changed("OLMoE-1B-7B", num_experts=None), "num_experts or num_local_experts is missing"),
    ],
)
def test_unsupported_fields_are_refused(fields, message):
    with pytest.raises(CheckpointError, match=message):
        configure(fields)


def test_unknown_families_are_refused_with_the_known_ones():
    assert sorted(FAMILIES) == [
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        "llama",
        "mixtral",
        "olmoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
    ]
    with pytest.raises(CheckpointError, match=r"'deepseek_v2', .*'qwen3_moe'\], got 'gemma3'"):
        find_family("gemma3", "config.json")
