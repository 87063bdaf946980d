"""Whole models: other tools' checkpoints and logits, damaged checkpoints, generation, memory.

Names in brackets, as in [C17], are those of the project's list of known faults.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.experts.cpu_int4 import CPUExpertsInt4
from jax_w4a8.models import Decoder, PackedWeight, default_model_path, load_model, read_plan
from jax_w4a8.models import decoder as decoder_module
from jax_w4a8.models.config import DenseConfig, MixtureConfig
from jax_w4a8.models.describe import describe_modules
from jax_w4a8.models.layers import matmul_float
from jax_w4a8.weights import LinearWeights

from .checkpoints import (
    DATA,
    QWEN3_MOE,
    SHARED,
    edited,
    golden,
    quantized_tensors,
    random_model,
    read_tensors,
    relative,
    scheme,
    write,
)
from .qwen3_reference import Reference

PACKED = DATA / "qwen3_moe-g32-pack"
PROMPT = np.load(PACKED / "reference.npz")["prompt_ids"][None]


@functools.cache
def golden_case(name: str):
    """Directory and reference of a checkpoint; skips the test where it is absent."""
    directory = golden(name)
    if directory is None:
        pytest.skip(f"{SHARED / name} is not here")
    return directory, dict(np.load(directory / "reference.npz"))


@functools.cache
def golden_logits(name: str, activation_scheme: str) -> np.ndarray:
    directory, reference = golden_case(name)
    model = load_model(directory, activation_scheme)
    return np.asarray(model(reference["prompt_ids"][None]))[0]


@functools.cache
def packed_model() -> Decoder:
    return load_model(PACKED, "symmetric")


# ---------------------------------------------------------------------------------------------------------
# The logits and texts of other tools.


@pytest.mark.parametrize("name", QWEN3_MOE)
def test_symmetric_logits_are_those_of_hugging_face(name):
    reference = golden_case(name)[1]
    logits = golden_logits(name, "symmetric")
    distance = relative(logits, reference["logits"])
    assert distance < 0.005
    assert 3 * distance <= relative(logits, reference["logits_weight_only"])


@pytest.mark.parametrize("name", QWEN3_MOE)
def test_asymmetric_logits_are_those_of_the_contract(name):
    directory, reference = golden_case(name)
    expected = Reference(directory, "asymmetric")(reference["prompt_ids"])
    assert relative(golden_logits(name, "asymmetric"), expected) < 0.005


@pytest.mark.parametrize("name", QWEN3_MOE)
def test_asymmetric_activations_add_less_error(name):
    """By equal experts: a token whose router is near a tie changes experts in either scheme, by luck.

    One such token decides the distance of a whole prompt, so that the order of the schemes would be luck too.
    """
    directory, reference = golden_case(name)
    exact = Reference(directory, None)
    expected = exact(reference["prompt_ids"])
    assert relative(expected, reference["logits_weight_only"]) < 1e-5
    error = {}
    for activation_scheme in ("symmetric", "asymmetric"):
        model = Reference(directory, activation_scheme)
        model.forced = exact.choices
        error[activation_scheme] = relative(model(reference["prompt_ids"]), expected)
    assert error["asymmetric"] <= error["symmetric"]


def test_asymmetric_logits_are_no_farther_from_exact_activations_over_all_checkpoints():
    square = {"symmetric": 0.0, "asymmetric": 0.0}
    for name in QWEN3_MOE:
        exact = golden_case(name)[1]["logits_weight_only"]
        for activation_scheme in square:
            square[activation_scheme] += relative(golden_logits(name, activation_scheme), exact) ** 2
    assert math.sqrt(square["asymmetric"]) <= 1.1 * math.sqrt(square["symmetric"])


def test_the_shipped_model_writes_the_reference_text_in_pure_jax():
    """tests/test_cli.py does the same with the backend of choice."""
    reference = np.load(DATA / "kjv-qwen3-moe-g32-pack" / "reference.npz")
    model = load_model(default_model_path(), "symmetric", backend="xla")
    made = model.generate(reference["prompt_ids"][None], len(reference["greedy_ids"]))
    assert made.dtype == np.int32
    assert made[0].tolist() == reference["greedy_ids"].tolist()


def test_the_shipped_model_gives_the_reference_logits():
    reference = np.load(DATA / "kjv-qwen3-moe-g32-pack" / "reference.npz")
    exact = reference["logits_weight_only"]
    logits = {}
    for activation_scheme in ("symmetric", "asymmetric"):
        model = load_model(default_model_path(), activation_scheme)
        logits[activation_scheme] = np.asarray(model(reference["prompt_ids"][None]))[0]
    assert relative(logits["symmetric"], reference["logits"]) < 0.005
    assert 3 * relative(logits["symmetric"], reference["logits"]) <= relative(logits["symmetric"], exact)
    assert relative(logits["asymmetric"], exact) <= 1.1 * relative(logits["symmetric"], exact)


def test_tiny_models_write_the_reference_ids():
    reference = golden_case("qwen3_moe-g32-pack")[1]
    made = packed_model().generate(PROMPT, len(reference["greedy_ids"]))
    assert made[0].tolist() == reference["greedy_ids"].tolist()


def test_the_shipped_model_is_the_reference_one():
    source = SHARED / "kjv-qwen3-moe-g32-pack"
    if not source.is_dir():
        pytest.skip(f"{source} is not here")
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        mine, theirs = ((root / name).read_bytes() for root in (default_model_path(), source))
        assert hashlib.sha256(mine).digest() == hashlib.sha256(theirs).digest()


# ---------------------------------------------------------------------------------------------------------
# Damaged and unusual checkpoints.


def rename(old, new):
    def edit(tensors):
        tensors[new] = tensors.pop(old)

    return edit


def change(name, function):
    def edit(tensors):
        tensors[name] = np.asarray(function(tensors[name]))

    return edit


EXPERT = "model.layers.0.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda t: t.pop(f"{EXPERT}.weight_scale"), f"'{EXPERT}.weight_scale' is missing"),
        (rename("lm_head.weight", "head.weight"), "'lm_head.weight' is missing"),
        (lambda t: t.update({f"{EXPERT}.bias": np.ones(64, np.float32)}), f"no module .*{EXPERT}.bias"),
        (
            lambda t: t.update({"model.layers.3.input_layernorm.weight": np.ones(128, np.float32)}),
            "no module .*model.layers.3.input_layernorm.weight",
        ),
        (  # [C4]
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj_packed": np.ones(4, np.int32)}),
            "no module .*experts.gate_up_proj_packed",
        ),
        (change(f"{EXPERT}.weight_packed", lambda w: w[:, :8]), rf"'{EXPERT}.weight_packed' must have shape"),
        (change("model.norm.weight", lambda w: w.astype(np.int8)), "'model.norm.weight' must be BF16"),
        (change("model.norm.weight", lambda w: np.full_like(w, np.nan)), "'model.norm.weight' holds NaN"),
        (
            change(f"{EXPERT}.weight_scale", lambda w: np.full_like(w, np.inf)),
            f"'{EXPERT}.weight_scale' holds NaN",
        ),
        (change("lm_head.weight", np.zeros_like), "'lm_head.weight' is all zeros"),
        (change("model.embed_tokens.weight", lambda w: w[:-1]), r"shape \[512, 128\], got \[511, 128\]"),
    ],
)
def test_damaged_tensors_are_named_before_any_forward(tmp_path, edit, message):  # [C5]
    with pytest.raises(CheckpointError, match=message):
        load_model(edited(tmp_path, tensors=edit))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bert"}, r"model_type must be one of \[.*'qwen3_moe'.*\], got 'bert'"),
        ({"model_type": None}, "model_type must be one of .* got None"),
        ({"num_local_experts": 0}, "num_local_experts must be an integer of at least 1, got 0"),  # [C16]
        ({"num_local_experts": None}, "num_experts or num_local_experts is missing"),
        ({"num_experts": 16}, "contradict each other: .*16.*8"),
        ({"num_local_experts": 9}, r"'model.layers.0.mlp.gate.weight' must have shape \[9, 128\]"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the number of experts, 8, got 9"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "128"}, "hidden_size must be an integer of at least 1, got '128'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor"),
        ({"hidden_act": "relu"}, "hidden_act must be one of .* got 'relu'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, got -1"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"attention_bias": True}, "'model.layers.0.self_attn.q_proj.bias' is missing"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers must be non-negative integers"),
        ({"mlp_only_layers": []}, "'model.layers.1.mlp.gate.weight' is missing"),
        ({"decoder_sparse_step": 2}, "'model.layers.0.mlp.gate_proj.weight_packed' is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters must be of rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must be of rope_type"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive number, got 0"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding_window must be null .* got 64"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types must be null or 'full_attention'"),
        ({"quantization_config": None}, "no quantization_config"),
    ],
)
def test_unsupported_configurations_are_refused_by_field(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message):
        read_plan(edited(tmp_path, config=lambda config: config.update(fields)))


def test_other_schemes_are_refused(tmp_path):  # [C19] [C20]
    def weight_only(config):
        scheme(config)["input_activations"] = None

    with pytest.raises(CheckpointError, match=r"config\.json: .*input_activations .* null .*W4A16"):
        load_model(edited(tmp_path, config=weight_only))


def test_a_quantised_embedding_is_refused(tmp_path):
    def targets(config):
        scheme(config)["targets"] = ["Linear", "Embedding"]

    with pytest.raises(CheckpointError, match=r"quantises the embedding 'model.embed_tokens'"):
        read_plan(edited(tmp_path, config=targets))


def test_older_spellings_of_the_configuration(tmp_path):
    def older(config):
        del config["rope_parameters"]
        config |= {"rope_theta": 10000, "rope_scaling": None, "num_experts": config.pop("num_local_experts")}
        config |= {"eos_token_id": [1, 2], "sliding_window": 4096, "layer_types": ["full_attention"] * 3}

    path = edited(tmp_path, config=older)
    config = read_plan(path)[0]
    assert config == read_plan(PACKED)[0].__class__(**{**vars(read_plan(PACKED)[0]), "eos_token_ids": (1, 2)})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_plan(path)[0].eos_token_ids == (7,)


def test_dense_and_moe_layers_follow_the_schedule(tmp_path):  # [B18]
    from jax_w4a8.models.fields import Fields
    from jax_w4a8.models.qwen3_moe import configure

    fields = json.loads((PACKED / "config.json").read_text())
    fields |= {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    kinds = [type(mlp) for mlp in configure(Fields(fields, "config.json")).mlps]
    assert kinds == [DenseConfig, MixtureConfig, DenseConfig, DenseConfig]


def test_one_expert_is_enough(tmp_path):  # [C16]
    model = load_model(random_model(tmp_path, experts=1, top_k=1))
    assert np.isfinite(np.asarray(model(PROMPT % 64))).all()


def test_a_short_last_group_runs(tmp_path):  # [C11]
    path = random_model(tmp_path, hidden=80, intermediate=48)
    tensors = read_tensors(path)
    assert tensors["model.layers.0.mlp.experts.0.up_proj.weight_scale"].shape == (48, 3)
    assert np.isfinite(np.asarray(load_model(path)(PROMPT % 64))).all()


def tie(config):
    config["tie_word_embeddings"] = True


def same_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def test_tied_embeddings(tmp_path):  # [C17]
    untied = load_model(edited(tmp_path / "a", tensors=same_head), "symmetric")
    assert untied.head is not None
    with_copy = load_model(edited(tmp_path / "b", tie, same_head), "symmetric")
    without = load_model(edited(tmp_path / "c", tie, lambda t: t.pop("lm_head.weight")), "symmetric")
    assert with_copy.head is None
    expected = np.asarray(untied(PROMPT))
    assert np.array_equal(np.asarray(with_copy(PROMPT)), expected)
    assert np.array_equal(np.asarray(without(PROMPT)), expected)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        read_plan(edited(tmp_path / "d", tie))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing"):
        read_plan(edited(tmp_path / "e", tensors=lambda t: t.pop("lm_head.weight")))


def quantize_head(tensors, name="lm_head"):
    weight = tensors.pop(f"{name}.weight").astype(np.float32)
    scale = (np.abs(weight).reshape(len(weight), -1, 32).max(-1) / 7.5).astype(ml_dtypes.bfloat16)
    codes = np.rint(weight / np.repeat(scale.astype(np.float32), 32, axis=1))
    tensors |= quantized_tensors(name, np.clip(codes, -8, 7).astype(np.int8), scale)


def test_a_quantised_head(tmp_path):  # [C17]
    def no_ignore(config):
        config["quantization_config"]["ignore"].remove("lm_head")

    model = load_model(edited(tmp_path / "a", no_ignore, quantize_head), "symmetric")
    assert isinstance(model.head.weight, PackedWeight)
    assert relative(np.asarray(model(PROMPT)), np.asarray(packed_model()(PROMPT))) < 0.2
    with pytest.raises(CheckpointError, match=r"'lm_head.weight_packed' is missing"):
        read_plan(edited(tmp_path / "b", no_ignore))
    with pytest.raises(CheckpointError, match=r"'lm_head' is not quantised by config.json"):
        read_plan(edited(tmp_path / "c", tensors=quantize_head))
    with pytest.raises(CheckpointError, match="ties 'lm_head' to the embedding, but the files hold"):
        read_plan(edited(tmp_path / "d", tie, quantize_head))


def test_gate_and_up_are_not_interchangeable(tmp_path):  # [C18]
    def swap(tensors):
        for name in [n for n in tensors if ".gate_proj." in n]:
            other = name.replace(".gate_proj.", ".up_proj.")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    swapped = edited(tmp_path, tensors=swap)
    logits = np.asarray(load_model(swapped, "symmetric")(PROMPT))[0]
    assert relative(logits, Reference(swapped, "symmetric")(PROMPT[0])) < 0.005
    assert relative(logits, golden_logits("qwen3_moe-g32-pack", "symmetric")) > 0.1


def test_attention_may_stay_in_floating_point(tmp_path):
    def ignore(config):
        config["quantization_config"]["ignore"].append("re:.*self_attn.*")

    def dequantize(tensors):
        reference = Reference(PACKED, None)
        for name in [n.removesuffix(".weight_packed") for n in tensors if "attn" in n and "_packed" in n]:
            for suffix in ("packed", "scale", "shape"):
                del tensors[f"{name}.weight_{suffix}"]
            tensors[f"{name}.weight"] = reference._weight(name).astype(np.float32)

    model = load_model(edited(tmp_path, ignore, dequantize), "symmetric")
    assert isinstance(model.layers[0].attention.query.weight, nnx.Param)
    exact = golden_case("qwen3_moe-g32-pack")[1]["logits_weight_only"]
    logits = np.asarray(model(PROMPT))[0]
    assert relative(logits, exact) < relative(golden_logits("qwen3_moe-g32-pack", "symmetric"), exact)


def test_biases_of_attention(tmp_path):
    def biased(value):
        def edit(tensors):
            for name in [n for n in tensors if "self_attn" in n and n.endswith("_packed")]:
                bias = np.full(len(tensors[name]), value, ml_dtypes.bfloat16)
                tensors[name.replace("weight_packed", "bias")] = bias

        return edit

    def flag(config):
        config["attention_bias"] = True

    expected = np.asarray(packed_model()(PROMPT))
    zero = load_model(edited(tmp_path / "a", flag, biased(0)), "symmetric")
    assert np.array_equal(np.asarray(zero(PROMPT)), expected)
    one = load_model(edited(tmp_path / "b", flag, biased(1)), "symmetric")
    assert relative(np.asarray(one(PROMPT)), expected) > 0.1


# ---------------------------------------------------------------------------------------------------------
# Loading.


def test_a_checkpoint_is_understood_without_a_backend_but_not_loaded(monkeypatch):
    monkeypatch.setattr(CPUExpertsInt4, "unavailable_reason", lambda platform: "it is hidden")
    config, plan = read_plan(PACKED)
    assert config.num_layers == 3
    assert {row.backend for row in describe_modules(config, plan)} == {"-", "XLA"}
    with pytest.raises(ValueError, match="it is hidden"):
        load_model(PACKED, backend="cpu_int4")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"activation_scheme must be one of .* got 'static'"):
        load_model(PACKED, activation_scheme="static")
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'tpu'"):
        load_model(PACKED, backend="tpu")
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        load_model(PACKED / "nowhere")


def test_progress_counts_every_byte():
    seen = []
    load_model(PACKED, progress=lambda done, total: seen.append((done, total)))
    total = sum(value.nbytes for value in read_tensors(PACKED).values())
    assert {t for _, t in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == total


def test_a_progress_bar_goes_to_standard_error(capsys):
    pytest.importorskip("rich")
    load_model(PACKED, progress=True)
    load_model(PACKED, progress=False)
    assert capsys.readouterr().out == ""


def test_packed_weights_are_no_parameters():
    model = packed_model()
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameters
    assert all(leaf.dtype == jnp.bfloat16 for leaf in parameters)
    packed = jax.tree.leaves(nnx.state(model, PackedWeight))
    assert any(leaf.dtype == jnp.uint8 for leaf in packed)


MEASURE = """
import sys
import jax
from jax_w4a8.models import load_model

def peak():
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))

jax.numpy.ones(3).block_until_ready()
before = peak()
model = load_model(sys.argv[1])
print(sum(leaf.nbytes for leaf in jax.tree.leaves(model)), peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "layers"),
    [(1024, 512, 64, 3), pytest.param(7168, 2048, 4, 1, id="experts of DeepSeek-V3's size")],
)
def test_loading_takes_the_weights_and_two_experts(tmp_path, hidden, intermediate, experts, layers):
    shape = {"hidden": hidden, "intermediate": intermediate, "experts": experts, "layers": layers}
    path = fast_random_model(tmp_path, **shape, group_size=128)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    weights, taken = map(int, ran.stdout.split())
    expert = 3 * hidden * intermediate * (0.5 + 2 / 128)  # as it is stored
    mapped = 32e6  # of the file that is open
    modules = 20e6  # code that is first loaded by loading
    assert weights > 0.8 * layers * experts * expert
    room = weights + 2 * expert + mapped + modules
    assert taken < room, f"{weights / 1e6:.0f} MB of weights took {taken / 1e6:.0f} MB of {room / 1e6:.0f}"


def fast_random_model(directory, **shape):
    """As ``random_model``, with words of random bits, made once for all experts."""
    small = random_model(directory / "small", **(shape | {"experts": 1, "layers": 1}))
    tensors = read_tensors(small)
    config = json.loads((small / "config.json").read_text())
    config |= {"num_local_experts": shape["experts"], "num_hidden_layers": shape["layers"]}
    first = {name: value for name, value in tensors.items() if name.startswith("model.layers.0.")}
    for layer in range(shape["layers"]):
        for name, value in first.items():
            name = name.replace("layers.0.", f"layers.{layer}.")
            if ".experts.0." in name:
                for expert in range(shape["experts"]):
                    tensors[name.replace("experts.0.", f"experts.{expert}.")] = value
            elif name.endswith("mlp.gate.weight"):
                tensors[name] = np.repeat(value, shape["experts"], axis=0)
            else:
                tensors[name] = value
    return write(directory / "whole", config, tensors)


# ---------------------------------------------------------------------------------------------------------
# Forward and generation.


def test_generation_equals_the_full_forward_again_and_again():
    model = packed_model()
    made = model.generate(PROMPT, 6)
    tokens = PROMPT
    for step in range(made.shape[1]):
        padded = np.pad(tokens, [(0, 0), (0, PROMPT.shape[1] + 6 - tokens.shape[1])])
        likeliest = np.asarray(model(padded))[0, tokens.shape[1] - 1].argmax()
        assert made[0, step] == likeliest
        tokens = np.concatenate([tokens, [[likeliest]]], axis=1)


def test_rows_of_a_batch_do_not_mix():
    model = packed_model()
    batch = np.concatenate([PROMPT, PROMPT[:, ::-1]])
    made = model.generate(batch, 5)
    assert made.shape == (2, 5)
    assert np.array_equal(made[:1], model.generate(PROMPT, 5))
    assert np.array_equal(made[1:], model.generate(PROMPT[:, ::-1], 5))
    assert model.generate(batch, 0).shape == (2, 0)


def test_programs_are_compiled_once_per_shape():
    model = packed_model()
    model(PROMPT)
    compiled = decoder_module._logits._cache_size()
    model(PROMPT[:, ::-1])
    load_model(PACKED, "symmetric")(PROMPT)
    assert decoder_module._logits._cache_size() == compiled
    list(model.stream(PROMPT, 3))
    stream = model.stream(PROMPT[:, ::-1], 4)
    list(stream)
    assert stream.times.compile_seconds < 0.5


def test_a_model_is_a_pytree_for_jax():
    model = packed_model()
    expected = np.asarray(model(PROMPT))
    jitted = jax.jit(lambda model, ids: model(ids)[:, -1])
    assert np.array_equal(np.asarray(jitted(model, jnp.asarray(PROMPT))), expected[:, -1])
    again = nnx.merge(*nnx.split(model))
    assert np.array_equal(np.asarray(again(PROMPT)), expected)


def test_a_stream_stops_where_a_text_ends():
    reference = golden_case("qwen3_moe-g32-pack")[1]["greedy_ids"].tolist()
    end = reference[4]
    stop = reference.index(end) + 1
    model = packed_model()
    assert [int(token[0]) for token in model.stream(PROMPT, 16, stop_token_ids=[end])] == reference[:stop]
    assert model.generate(PROMPT, 16, stop_token_ids=[end]).tolist() == [reference[:stop]]
    assert model.generate(PROMPT, 16).tolist() == [reference]
    stream = model.stream(np.concatenate([PROMPT, PROMPT[:, ::-1]]), 16, stop_token_ids=[end])
    ended = np.stack(list(stream), axis=1)[0].tolist()
    assert ended == reference[:stop] + [end] * (len(ended) - stop)
    assert stream.times.prefill_rate > 0
    assert stream.times.decode_tokens == 2 * (len(ended) - 1)


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        (np.zeros((1, 3), np.float32), TypeError, "token_ids must be integers, got float32"),
        (np.zeros(3, np.int32), ValueError, r"token_ids must have shape \[B, T\], got \(3,\)"),
        (np.array([[0, 512]]), ValueError, r"token_ids must lie in \[0, 512\), found 512"),
        (np.array([[0, -1]]), ValueError, r"found -1"),
        (np.array([[2**40]]), ValueError, "found 1099511627776"),
    ],
)
def test_bad_token_ids_are_named(token_ids, error, message):
    for call in (packed_model(), packed_model().generate):
        with pytest.raises(error, match=message):
            call(token_ids)


def test_bad_lengths_are_named():
    model = packed_model()
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -1"):
        model.generate(PROMPT, -1)
    with pytest.raises(ValueError, match=r"max_new_tokens must be at most 232: .* got 233"):
        model.generate(PROMPT, 233)
    with pytest.raises(ValueError, match="at least one token per row"):
        model.generate(np.zeros((1, 0), np.int32), 1)


def test_ids_beyond_the_vocabulary_never_read_elsewhere():
    """Traced ids can't be checked; a row that doesn't exist is NaN."""
    embedding = packed_model().embedding
    rows = np.asarray(jax.jit(lambda ids: embedding(ids))(jnp.array([511, 512, 2**31 - 1])))
    assert np.isfinite(rows[0]).all()
    assert np.isnan(rows[1:]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_float_matmul_has_the_accuracy_of_float32(dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 257)).astype(np.float32) * np.float32(10.0) ** rng.integers(
        -9, 9, (3, 5, 1)
    )
    weight = jnp.asarray(rng.standard_normal((33, 257)), dtype)
    expected = x.astype(np.float64) @ np.asarray(weight, np.float64).T
    made = np.asarray(jax.jit(matmul_float)(jnp.asarray(x, jnp.float32), weight))
    error = np.abs(made - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() < 2e-6


def test_linear_weights_keep_their_type_inside_a_model():
    weight = packed_model().layers[0].attention.query.weight
    assert isinstance(weight, PackedWeight)
    assert isinstance(weight.get_value(), LinearWeights)
