"""How a checkpoint may lay out its modules: fused experts, other names, mixed precision, weight-only weights.

Names in brackets, as in [C4], are those of the project's list of known faults.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_w4a8.checkpoint import (
    Checkpoint,
    CheckpointError,
    ExpertLayout,
    FloatExperts,
    claim_experts,
    parse_quantization_config,
)
from jax_w4a8.cli import main
from jax_w4a8.experts.base import Activation
from jax_w4a8.models import load_model, read_plan
from jax_w4a8.models.float_experts import apply_float_experts

from .checkpoints import (
    DATA,
    edited,
    float_model,
    pack_words,
    quantization,
    quantized_tensors,
    random_codes,
    random_linear,
    random_model,
    read_tensors,
    relative,
    scheme,
    write,
)

BFLOAT16 = ml_dtypes.bfloat16
PROMPT = np.load(DATA / "qwen3_moe-g32-pack" / "reference.npz")["prompt_ids"][None]
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
E, H, I = 3, 64, 96  # noqa: E741


def layout(**changes):
    names = {name: f"experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")}
    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I}
    return ExpertLayout("experts", **(names | sizes | changes))


def config_of(group_size=32, storage="pack-quantized"):
    return {"quantization_config": quantization(group_size, storage)}


class Experts:
    """Random experts, in every layout."""

    def __init__(self, group_size=32, scale_dtype=BFLOAT16, hidden=H, inner=I):
        rng = np.random.default_rng(0)
        self.group_size = group_size
        self.codes, self.scales, self.biases = {}, {}, {}
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            groups = 1 if group_size is None else -(-columns // group_size)
            self.codes[name] = np.stack([random_codes(rng, rows, columns) for _ in range(E)])
            self.scales[name] = rng.uniform(0.01, 0.02, (E, rows, groups)).astype(scale_dtype)
            self.biases[name] = rng.standard_normal((E, rows)).astype(BFLOAT16)

    def separate(self, names=("gate_proj", "up_proj", "down_proj"), bias=False):
        tensors = {}
        for ours, theirs in zip(("gate", "up", "down"), names, strict=True):
            for expert in range(E):
                module = f"experts.{expert}.{theirs}"
                tensors |= quantized_tensors(module, self.codes[ours][expert], self.scales[ours][expert])
                if bias:
                    tensors[f"{module}.bias"] = self.biases[ours][expert]
        return tensors

    def joined(self, values, interleaved):
        pair = np.stack([values["gate"], values["up"]], 2 if interleaved else 1)
        return {"gate_up_proj": pair.reshape(E, -1, *values["gate"].shape[2:]), "down_proj": values["down"]}

    def fused(self, *, packed, transposed, interleaved=False, style="parameter", bias=False, words=-1):
        """``words``: along which axis of a transposed tensor codes share a word."""
        tensors = {}
        dot = {"parameter": "_", "module": ".weight_"}[style]
        codes, scales = self.joined(self.codes, interleaved), self.joined(self.scales, interleaved)
        for name, value in codes.items():
            scale = scales[name]
            if transposed:
                value, scale = value.swapaxes(1, 2), scale.swapaxes(1, 2)
            if packed:
                tensors[f"experts.{name}{dot}shape"] = np.array(value.shape, np.int64)
                swapped = value.swapaxes(1, 2) if words == -2 else value
                value = np.stack([pack_words(matrix) for matrix in swapped])
                value = value.swapaxes(1, 2) if words == -2 else value
                tensors[f"experts.{name}{dot}packed"] = value
            else:
                tensors[f"experts.{name}" + (".weight" if style == "module" else "")] = value
            tensors[f"experts.{name}{dot}scale"] = scale
        if bias:
            for name, value in self.joined(self.biases, interleaved).items():
                tensors[f"experts.{name}" + (".bias" if style == "module" else "_bias")] = value
        return tensors


def read_experts(directory, tensors, storage="pack-quantized", group_size=32, **changes):
    checkpoint = Checkpoint(write(directory, config_of(group_size, storage), tensors))
    stored = claim_experts(checkpoint, layout(**changes))
    checkpoint.finish()
    return stored


def assert_same(stored, expected):
    made, wanted = stored.read(), expected.read()
    assert jax.tree.structure(made) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


# ---------------------------------------------------------------------------------------------------------
# Experts.


@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("style", ["parameter", "module"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("orientation", ["out, in", "in, out", "in, out with words along inputs"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_experts_equal_separate_ones(
    tmp_path, group_size, style, packed, orientation, interleaved
):  # [C4]
    experts = Experts(group_size)
    words = -2 if "words" in orientation else -1
    fused = experts.fused(
        packed=packed,
        transposed=orientation != "out, in",
        interleaved=interleaved,
        style=style,
        bias=True,
        words=words,
    )
    storage = "pack-quantized" if packed else "int-quantized"
    options = {"group_size": group_size, "bias": True, "interleaved": interleaved}
    stored = read_experts(tmp_path / "fused", fused, storage, **options)
    expected = read_experts(
        tmp_path / "separate", experts.separate(bias=True), group_size=group_size, bias=True
    )
    assert_same(stored, expected)
    shapes = sum(value.nbytes for name, value in fused.items() if name.endswith("shape"))
    assert stored.nbytes == sum(value.nbytes for value in fused.values()) - shapes


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(64, 32), (64, 64), (96, 48)])  # 2I = H, I = H
def test_sizes_that_look_alike_are_told_apart(tmp_path, transposed, sizes):
    hidden, inner = sizes
    experts = Experts(32, hidden=hidden, inner=inner)
    options = {"hidden_size": hidden, "intermediate_size": inner}
    fused = experts.fused(packed=False, transposed=transposed)
    stored = read_experts(tmp_path / "fused", fused, "int-quantized", **options)
    assert_same(stored, read_experts(tmp_path / "separate", experts.separate(), **options))


def test_separate_fused_projections_and_a_short_last_group(tmp_path):  # [C11]
    experts = Experts(64)
    fused = {}
    for name in ("gate", "up", "down"):
        fused[f"experts.{name}_proj"] = experts.codes[name]
        fused[f"experts.{name}_proj_scale"] = experts.scales[name]
    assert fused["experts.down_proj_scale"].shape == (E, H, 2)  # 96 inputs in groups of 64
    stored = read_experts(tmp_path / "fused", fused, "int-quantized", group_size=64)
    assert_same(stored, read_experts(tmp_path / "separate", experts.separate(), group_size=64))


@pytest.mark.parametrize("scale_dtype", [BFLOAT16, np.float16, np.float32])
@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_names_of_projections(tmp_path, names, scale_dtype):  # [C18] [C13]
    """The experts are random, so that no two projections could be taken for each other."""
    experts = Experts(scale_dtype=scale_dtype)
    stored = read_experts(tmp_path / "a", experts.separate(names), gate="x.{expert}.linear")
    assert_same(stored, read_experts(tmp_path / "b", experts.separate()))
    swapped = experts.separate((names[1], names[0], names[2]))
    with pytest.raises(AssertionError):
        assert_same(read_experts(tmp_path / "c", swapped), stored)


def test_one_expert_and_none(tmp_path):  # [C16]
    one = {n: v for n, v in Experts().separate().items() if n.startswith("experts.0.")}
    assert len(read_experts(tmp_path / "one", one, num_experts=1).read().w13.codes) == 1
    with pytest.raises(CheckpointError, match=r"'experts' has no experts in a known layout"):
        read_experts(tmp_path / "none", random_linear("fc", 16, 64), num_experts=1)
    with pytest.raises(CheckpointError, match=r"'experts' must have at least one expert, got 0"):
        read_experts(tmp_path / "zero", one, num_experts=0)
    with pytest.raises(CheckpointError, match=r"num_local_experts must be an integer of at least 1, got 0"):
        read_plan(edited(tmp_path / "config", lambda config: config.update(num_local_experts=0)))


def test_unknown_names_under_experts_are_listed(tmp_path):  # [C4] [C5]
    tensors = Experts().fused(packed=True, transposed=False)
    renamed = {name.replace("gate_up_proj", "fc1"): value for name, value in tensors.items()}
    message = r"known layout: .*'experts.gate_up_proj'; the files hold .*experts\.fc1_packed"
    with pytest.raises(CheckpointError, match=message):
        read_experts(tmp_path / "a", renamed)
    tensors["experts.gate_up_proj_offset"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError, match=r"belong to no module .*experts\.gate_up_proj_offset"):
        read_experts(tmp_path / "b", tensors)


def change(name, function):
    return lambda tensors: tensors.update({name: np.asarray(function(tensors[name]))})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("experts.down_proj_packed"), "'experts.down_proj' is missing beside"),
        (lambda t: t.pop("experts.down_proj_scale"), "'experts.down_proj_scale' is missing"),
        (lambda t: t.pop("experts.gate_up_proj_bias"), "'experts.gate_up_proj_bias' is missing"),
        (
            change("experts.gate_up_proj_packed", lambda w: w[:2]),
            r"'experts.gate_up_proj_packed' must have shape \[3, 192, 8\] or .*, got \[2, 192, 8\]",
        ),
        (
            change("experts.down_proj_packed", lambda w: w.astype(np.int64)),
            "'experts.down_proj_packed' must be I32 or floating point, got I64",
        ),
        (  # groups along outputs, which no kernel of ours has
            change("experts.gate_up_proj_scale", lambda s: np.ones((E, 6, H), np.float32)),
            r"'experts.gate_up_proj_scale' must have shape \[3, 192, 2\] \(groups run along inputs\)",
        ),
        (
            change("experts.down_proj_scale", lambda s: s.astype(np.int32)),
            "'experts.down_proj_scale' must be BF16, F16 or F32, got I32",
        ),
        (
            change("experts.down_proj_shape", lambda s: s[::-1]),
            r"'experts.down_proj_shape' must hold \[3, 64, 96\]",
        ),
        (
            lambda t: t.update({"experts.down_proj_zero_point": np.zeros((E, H, 3), np.int8)}),
            "'experts.down_proj_zero_point': zero points aren't supported",
        ),
        (
            change("experts.down_proj_packed", lambda w: np.zeros((E, I, H // 8), np.int32)),
            r"'experts.down_proj_packed' \[3, 96, 8\] has another order of axes",
        ),
    ],
)
def test_a_wrong_fused_tensor_is_named(tmp_path, edit, message):  # [C3]
    tensors = Experts().fused(packed=True, transposed=False, bias=True)
    edit(tensors)
    with pytest.raises(CheckpointError, match=message):
        read_experts(tmp_path, tensors, bias=True)


def test_a_code_out_of_range_in_a_fused_tensor(tmp_path):  # [C1]
    tensors = Experts().fused(packed=False, transposed=False)
    tensors["experts.down_proj"][1, 2, 3] = 9
    stored = read_experts(tmp_path, tensors, "int-quantized")
    message = r"'experts.1.down_proj.weight' must hold codes of \[-8, 7\], found 9"
    with pytest.raises(CheckpointError, match=message):
        stored.read()


def test_fused_experts_that_the_configuration_leaves_alone(tmp_path):
    tensors = Experts().fused(packed=True, transposed=False)
    config = config_of()
    config["quantization_config"]["ignore"] = ["re:experts.*"]
    with pytest.raises(
        CheckpointError, match=r"is not quantised by .*, but tensor 'experts.gate_up_proj_packed'"
    ):
        claim_experts(Checkpoint(write(tmp_path, config, tensors)), layout())


def test_a_model_with_fused_experts_computes_the_same(tmp_path):
    """The whole way: names of a family, plan, packing, logits."""

    def fuse(tensors):
        for layer in (0, 2):
            prefix = f"model.layers.{layer}.mlp.experts"

            def stack(*names, prefix=prefix):
                rows = [
                    np.concatenate([tensors.pop(f"{prefix}.{expert}.{name}") for name in names])
                    for expert in range(8)
                ]
                return np.stack(rows)

            for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for kind in ("packed", "scale"):
                    tensors[f"{prefix}.{name}_{kind}"] = stack(*(f"{part}.weight_{kind}" for part in parts))
            for name in [n for n in tensors if n.startswith(prefix) and n.endswith("weight_shape")]:
                del tensors[name]

    sparse = [
        n for n in read_tensors(DATA / "qwen3_moe-g32-pack") if ".experts.0.gate_proj.weight_packed" in n
    ]
    assert sorted(name.split(".")[2] for name in sparse) == ["0", "2"]
    fused = load_model(edited(tmp_path, tensors=fuse), "symmetric")(PROMPT)
    assert np.array_equal(fused, load_model(DATA / "qwen3_moe-g32-pack", "symmetric")(PROMPT))


# ---------------------------------------------------------------------------------------------------------
# Mixed precision.


def in_floating_point(tensors, module):
    """Dequantises a module of a checkpoint, for the reference and for a checkpoint that leaves it alone."""
    codes = (
        np.concatenate(
            [
                (tensors[f"{module}.weight_packed"].view(np.uint32) >> np.uint32(4 * i) & np.uint32(15))[
                    ..., None
                ]
                for i in range(8)
            ],
            -1,
        )
        .reshape(len(tensors[f"{module}.weight_scale"]), -1)
        .astype(np.float32)
        - 8
    )
    scale = tensors[f"{module}.weight_scale"].astype(np.float32)
    weight = codes * np.repeat(scale, codes.shape[1] // scale.shape[1], 1)
    for kind in ("packed", "scale", "shape"):
        del tensors[f"{module}.weight_{kind}"]
    tensors[f"{module}.weight"] = weight


IGNORES = {
    "exact name": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"],
    "expression": [r"re:.*self_attn\.[qk]_proj$"],
    "parent": ["model.layers.0.self_attn"],
    "class": ["Linear"],
}


@pytest.mark.parametrize("kind", IGNORES)
def test_modules_that_are_ignored_run_in_floating_point(tmp_path, kind):
    directory = random_model(tmp_path / "quantised")
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    matching = {
        "exact name": lambda n: n in IGNORES["exact name"],
        "expression": lambda n: n.endswith(("q_proj", "k_proj")),
        "parent": lambda n: "self_attn" in n,
        "class": lambda n: True,
    }[kind]
    modules = [n.removesuffix(".weight_packed") for n in tensors if n.endswith(".weight_packed")]
    ignored = [module for module in modules if matching(module)]
    for module in ignored:
        in_floating_point(tensors, module)
    config["quantization_config"]["ignore"] += IGNORES[kind]
    mixed = write(tmp_path / "mixed", config, tensors)
    logits = np.asarray(load_model(mixed)(TOKENS))
    everything = load_file(directory / "model.safetensors")
    for module in modules:
        in_floating_point(everything, module)
    del config["quantization_config"]
    exact = load_model(write(tmp_path / "float", config, everything), allow_float=True)(TOKENS)
    quantised = load_model(directory)(TOKENS)
    distance = relative(logits, np.asarray(exact))
    if kind == "class":  # nothing is left that has INT8 activations
        assert distance < 1e-5
    else:
        assert not np.array_equal(logits, quantised)
        assert 1e-3 < distance < 0.2
    # Where the files hold codes after all, an ignored parent changes nothing.
    if kind == "parent":
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"]["ignore"] += IGNORES[kind]
        again = write(tmp_path / "again", config, load_file(directory / "model.safetensors"))
        assert np.array_equal(load_model(again)(TOKENS), quantised)


def test_experts_in_floating_point_beside_quantised_attention(tmp_path):
    """A token gets the same alone as among others, who chose other experts."""
    directory = random_model(tmp_path / "quantised", experts=8, top_k=2, layers=2)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    for module in [n.removesuffix(".weight_packed") for n in tensors if "layers.1.mlp" in n]:
        if f"{module}.weight_packed" in tensors:
            in_floating_point(tensors, module)
    config["quantization_config"]["ignore"] += [r"re:.*layers\.1\.mlp.*"]
    mixed = write(tmp_path / "mixed", config, tensors)
    plan = read_plan(mixed)[1]
    assert [layer.mlp.experts.scheme is None for layer in plan.layers] == [False, True]
    model = load_model(mixed)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(model.layers[1].mlp.experts)) == 8 * 3 * 32 * 64 * 4
    many, few = np.asarray(model(TOKENS)), np.asarray(model(TOKENS[:, :1]))
    assert relative(few[:, 0], many[:, 0]) < 1e-5
    assert relative(many, np.asarray(load_model(directory)(TOKENS))) < 0.2
    assert main(["info", str(mixed)]) == 0


@pytest.mark.parametrize("kind", ["silu", "swigluoai"])
def test_float_experts_are_a_weighted_sum(kind):
    rng = np.random.default_rng(0)
    experts = FloatExperts(
        *(
            (rng.standard_normal(shape) * 0.2).astype(np.float32)
            for shape in ((E, 2 * I, H), (E, H, I), (E, 2 * I), (E, H))
        )
    )
    x = rng.standard_normal((5, H)).astype(np.float32)
    ids = np.array([[0, 2], [2, 1], [1, 0], [0, -1], [-1, -1]])
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    made = apply_float_experts(x, weights, ids, experts, Activation(kind))
    expected = np.zeros((5, H))
    for token, slot in np.ndindex(ids.shape):
        expert = ids[token, slot]
        if expert < 0:
            continue
        gate, up = np.split(experts.w13[expert].astype(np.float64) @ x[token] + experts.w13_bias[expert], 2)
        if kind == "swigluoai":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
        inner = gate / (1 + np.exp(-gate * (1.702 if kind == "swigluoai" else 1))) * up
        y = experts.w2[expert].astype(np.float64) @ inner + experts.w2_bias[expert]
        expected[token] += weights[token, slot] * y
    assert relative(np.asarray(made), expected) < 1e-6
    assert not np.asarray(made[4]).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_experts_in_floating_point(tmp_path, interleaved):
    rng = np.random.default_rng(0)
    weights = {
        n: rng.standard_normal(s).astype(BFLOAT16)
        for n, s in (("gate", (E, I, H)), ("up", (E, I, H)), ("down", (E, H, I)))
    }
    experts = Experts()
    experts.codes = weights
    joined = experts.joined(weights, interleaved)
    tensors = {f"experts.{name}": value.swapaxes(1, 2) for name, value in joined.items()}
    stored = read_experts(tmp_path, tensors, interleaved=interleaved)
    assert stored.scheme is None
    made = stored.read_float()
    assert np.array_equal(made.w13, np.concatenate([weights["gate"], weights["up"]], 1))
    assert np.array_equal(made.w2, weights["down"])
    assert made.w13_bias is None
    with pytest.raises(CheckpointError, match="is in floating point, expected INT4"):
        stored.read()


def test_experts_of_two_precisions_are_refused(tmp_path):
    tensors = Experts().separate()
    in_floating_point(tensors, "experts.1.up_proj")
    config = config_of()
    config["quantization_config"]["ignore"] = ["experts.1.up_proj"]
    with pytest.raises(CheckpointError, match=r"must have one scheme: .*'experts\.1\.up_proj' has None"):
        claim_experts(Checkpoint(write(tmp_path, config, tensors)), layout())


def test_a_float_checkpoint_is_taken_when_asked_for(tmp_path):
    directory = float_model(tmp_path, layers=1)
    with pytest.raises(CheckpointError, match=r"has no quantization_config: .*quantize .*allow_float=True"):
        load_model(directory)
    model = load_model(directory, allow_float=True)
    assert np.isfinite(np.asarray(model(TOKENS))).all()


# ---------------------------------------------------------------------------------------------------------
# Schemes.


def weight_only(config):
    scheme(config)["input_activations"] = None


def test_weight_only_weights_run_only_when_asked_by_name(tmp_path):  # [C20]
    directory = edited(tmp_path, weight_only)
    with pytest.raises(
        CheckpointError, match=r"input_activations must describe .*weight_only='w4a8' runs it"
    ):
        load_model(directory)
    logits = load_model(directory, "symmetric", weight_only="w4a8")(PROMPT)
    assert np.array_equal(logits, load_model(DATA / "qwen3_moe-g32-pack", "symmetric")(PROMPT))
    with pytest.raises(ValueError, match=r"weight_only must be None or one of \['w4a8'\], got 'w4a16'"):
        load_model(directory, weight_only="w4a16")
    parsed = parse_quantization_config(weight_only_config(), weight_only="w4a8")
    assert parsed.scheme_for("fc").weight_only
    asymmetric = weight_only_config()
    asymmetric["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(CheckpointError, match=r"weights.symmetric must be true, got false"):
        parse_quantization_config(asymmetric, weight_only="w4a8")
    # What has activations of another kind is another scheme, and no way to run weights alone.
    other = quantization()
    other["config_groups"]["group_0"]["input_activations"]["type"] = "float"
    with pytest.raises(CheckpointError, match=r"input_activations.type must be 'int', got 'float'"):
        parse_quantization_config(other, weight_only="w4a8")


def weight_only_config():
    config = {"quantization_config": quantization()}
    weight_only(config)
    return config["quantization_config"]


def test_several_groups_by_name_expression_and_class_in_one_model(tmp_path):
    """Each module's group size is its own: the logits are those of the same weights in one group size."""
    directory = random_model(tmp_path / "one", group_size=64, intermediate=64)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    groups = config["quantization_config"]["config_groups"]
    base = groups["group_0"]
    finer = copy.deepcopy(base) | {"targets": [r"re:.*self_attn\..*"]}
    finer["weights"]["group_size"] = 32
    exact = copy.deepcopy(finer) | {"targets": ["model.layers.0.self_attn.o_proj"], "format": "int-quantized"}
    groups |= {"finer": finer, "exact": exact}
    for name in [n for n in tensors if "self_attn" in n and n.endswith("_scale")]:
        tensors[name] = np.repeat(tensors[name], 2, 1)
    o_proj = "model.layers.0.self_attn.o_proj"
    stored = Checkpoint(directory).linear(o_proj, 64, 64).read_quantized()
    for kind in ("packed", "shape"):
        del tensors[f"{o_proj}.weight_{kind}"]
    tensors[f"{o_proj}.weight"] = stored.codes
    several = write(tmp_path / "several", config, tensors)
    made = load_model(several, backend="xla")(TOKENS)
    assert relative(np.asarray(made), np.asarray(load_model(directory, backend="xla")(TOKENS))) < 1e-5


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "mxfp4", "quark", "modelopt"])
def test_other_methods_are_refused_by_name(tmp_path, method):
    directory = edited(tmp_path, lambda config: config["quantization_config"].update(quant_method=method))
    with pytest.raises(CheckpointError, match=f"quant_method must be 'compressed-tensors', got '{method}'"):
        load_model(directory)


def test_a_quantised_cache_changes_nothing_but_a_note(tmp_path, caplog):  # [C19]
    def cache(config):
        config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}

    def scales(tensors):
        for name in ("k", "v"):
            tensors[f"model.layers.0.self_attn.{name}_scale"] = np.ones(1, np.float32)

    with caplog.at_level(logging.WARNING):
        logits = load_model(edited(tmp_path, cache, scales), "symmetric")(PROMPT)
    assert "kv_cache_scheme is ignored" in caplog.text
    assert "self_attn.k_scale" in caplog.text
    assert np.array_equal(logits, load_model(DATA / "qwen3_moe-g32-pack", "symmetric")(PROMPT))


# ---------------------------------------------------------------------------------------------------------
# The output head.


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", ["head", "no head", "another head", "quantised head"])
def test_the_flag_of_tied_embeddings_against_the_files(tmp_path, tied, stored):  # [C17]
    directory = random_model(tmp_path / "source")
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": tied}
    tensors = load_file(directory / "model.safetensors")
    embedding, own = tensors["model.embed_tokens.weight"], tensors.pop("lm_head.weight")
    if stored == "head":
        tensors["lm_head.weight"] = embedding
    elif stored == "another head":
        tensors["lm_head.weight"] = own
    elif stored == "quantised head":
        tensors |= random_linear("lm_head", 64, 64, seed=1)
        config["quantization_config"]["ignore"].remove("lm_head")
    directory = write(tmp_path / "made", config, tensors)
    refusals = {
        (True, "another head"): "'lm_head.weight' differs from",
        (True, "quantised head"): "ties 'lm_head' to the embedding, but the files hold lm_head.weight_packed",
        (False, "no head"): "'lm_head.weight' is missing",
    }
    if (tied, stored) in refusals:
        with pytest.raises(CheckpointError, match=refusals[tied, stored]):
            load_model(directory)
        return
    logits = np.asarray(load_model(directory)(TOKENS))
    spread = np.ptp(logits, axis=-1)
    assert (spread > 0.1).all()  # no head that was never filled
    if stored in ("head", "no head"):
        tensors["lm_head.weight"] = embedding
        same = write(tmp_path / "same", config | {"tie_word_embeddings": False}, tensors)
        assert relative(np.asarray(load_model(same)(TOKENS)), logits) < 1e-6


# ---------------------------------------------------------------------------------------------------------
# The documentation.


def test_every_test_that_the_documentation_names_is_there():
    tests = Path(__file__).parent
    page = (tests.parent / "docs" / "checkpoints.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = set(re.findall(r"^def (test_\w+)", "".join(p.read_text() for p in tests.glob("test_*.py")), re.M))
    assert len(named) > 20
    assert named <= there


def test_the_documentation_s_code_runs(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text()
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, namespace)
    assert namespace["model"].config.model_type == "qwen3_moe"
    source = float_model(tmp_path / "source", layers=1, intermediate=64)
    assert 0 < namespace["shrink"](source, tmp_path / "out") < 0.2
