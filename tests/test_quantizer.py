"""The quantiser: its rules, its files, and what is left of a run that was killed."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jax_w4a8 as w4a8
from jax_w4a8.checkpoint import Checkpoint, CheckpointError
from jax_w4a8.checkpoint import quantizer as quantizer_module
from jax_w4a8.checkpoint.quantizer import QuantizeOptions, quantize_checkpoint
from jax_w4a8.checkpoint.scales import quantize_rows
from jax_w4a8.checkpoint.stored import pack_words
from jax_w4a8.checkpoint.writer import SafetensorsWriter, TensorSpec
from jax_w4a8.cli import main
from jax_w4a8.models import load_model
from jax_w4a8.quantization import unpack_words

from .checkpoints import SHARED, float_model, random_codes, relative

MODULE = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.0.down_proj"
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return float_model(tmp_path_factory.mktemp("float") / "source")


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def quantized(directory: Path, name: str, rows: int, columns: int):
    return Checkpoint(directory).linear(name, rows, columns).read_quantized()


# ---------------------------------------------------------------------------------------------------------
# Values.


@pytest.mark.parametrize(("group_size", "storage"), [(32, "pack"), (32, "int"), (64, "pack"), (-1, "int")])
def test_absmax_gives_the_codes_and_scales_of_quantize(tmp_path, source, group_size, storage):
    out = tmp_path / "out"
    options = QuantizeOptions(group_size, storage, ignore=(r"re:.*experts[.]\d+[.]down_proj$",))
    report = quantize_checkpoint(source, out, options)
    weights = load_file(source / "model.safetensors")
    made = quantized(out, MODULE, 64, 64)
    expected = w4a8.quantize(weights[f"{MODULE}.weight"], group_size, scale_dtype=ml_dtypes.bfloat16)
    assert np.array_equal(made.codes, expected.codes)
    assert np.array_equal(made.scale, expected.scale)
    errors = {module.name: module for module in report.modules}
    wide = weights[f"{MODULE}.weight"].astype(np.float64)
    error = relative(np.asarray(made.dequantize(), np.float64), wide)
    assert errors[MODULE].relative_error == pytest.approx(error, rel=1e-4)
    assert 0.05 < error < 0.2
    files = load_file(out / "model.safetensors")
    untouched = [name for name in weights if name in files and name != f"{MODULE}.weight"]
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight", f"{EXPERT}.weight"):
        assert name in untouched
        assert np.array_equal(files[name], weights[name])


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("scale_dtype", [ml_dtypes.bfloat16, np.float32])
def test_mse_is_never_worse_in_any_group(group_size, scale_dtype):
    rng = np.random.default_rng(0)
    weights = np.concatenate(
        [
            rng.standard_normal((64, 384)),
            rng.standard_t(2, (64, 384)),
            rng.uniform(-1, 1, (16, 384)),
            np.zeros((2, 384)),
            np.full((2, 384), -0.37),
            np.eye(4, 384) * 1e-30,
            rng.integers(-8, 8, (8, 384)) * 0.25,  # representable without error
        ]
    ).astype(np.float32)
    errors = {}
    for method in ("absmax", "mse"):
        made = quantize_rows(weights, group_size, scale_dtype, method)
        assert made.codes.min() >= -8
        assert made.codes.max() <= 7
        assert made.scale.dtype == scale_dtype
        whole = w4a8.QuantizedTensor(made.codes, made.scale, group_size)
        difference = np.asarray(whole.dequantize(), np.float64) - weights
        width = 384 if group_size < 0 else group_size
        errors[method] = np.square(difference).reshape(len(weights), -1, width).sum(-1)
        assert made.squared_error == pytest.approx(errors[method].sum(), rel=1e-4)
        assert made.squared_norm == pytest.approx(np.square(weights.astype(np.float64)).sum(), rel=1e-5)
    assert (errors["mse"] <= errors["absmax"] * (1 + 1e-5) + 1e-37).all()
    assert errors["mse"].sum() < 0.95 * errors["absmax"].sum()
    assert errors["mse"][-8:].sum() < 1e-3 * errors["absmax"][-8:].sum()


def test_mse_finds_the_least_error_of_a_fine_grid():
    weights = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    made = quantize_rows(weights, -1, np.float32, "mse")
    grid = np.abs(weights).max(1)[:, None] / np.geomspace(5, 25, 400)
    best = np.inf
    for scale in (*grid.T, *-grid.T):
        codes = np.clip(np.rint(weights / scale[:, None]), -8, 7)
        best = np.minimum(best, np.square(weights - codes * scale[:, None]).sum(1))
    error = np.square(weights - made.codes * made.scale).sum(1)
    assert (error < 1.02 * best).all()


def test_rows_do_not_depend_on_each_other():
    weights = np.random.default_rng(2).standard_normal((7, 64)).astype(np.float32)
    for method in ("absmax", "mse"):
        whole = quantize_rows(weights, 32, ml_dtypes.bfloat16, method)
        parts = [quantize_rows(part, 32, ml_dtypes.bfloat16, method) for part in (weights[:3], weights[3:])]
        assert np.array_equal(whole.codes, np.concatenate([part.codes for part in parts]))
        assert np.array_equal(whole.scale, np.concatenate([part.scale for part in parts]))


@pytest.mark.parametrize("columns", [1, 7, 8, 64, 77])
def test_packing_is_the_inverse_of_unpacking(columns):
    codes = random_codes(np.random.default_rng(0), 5, columns)
    assert np.array_equal(unpack_words(pack_words(codes), columns), codes)


def test_the_file_of_hugging_face_tools_comes_out_bit_for_bit(tmp_path):
    source, expected = SHARED / "kjv-qwen3-moe-float", SHARED / "kjv-qwen3-moe-g32-pack"
    if not source.is_dir():
        pytest.skip(f"{source} is not here")
    quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(32))
    made = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert made == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_sources_of_other_precisions_get_float32_scales(tmp_path, dtype):
    source = float_model(tmp_path / "source", layers=1, dtype=dtype)
    quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(32, scale="mse"))
    assert quantized(tmp_path / "out", MODULE, 64, 64).scale.dtype == np.float32
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == dtype


# ---------------------------------------------------------------------------------------------------------
# The directory that comes out.


def test_what_is_written_loads_and_computes(tmp_path, source):
    expected = np.asarray(load_model(source, allow_float=True)(TOKENS))
    distance = {}
    for scale in ("absmax", "mse"):
        quantize_checkpoint(source, tmp_path / scale, QuantizeOptions(32, scale=scale))
        distance[scale] = relative(np.asarray(load_model(tmp_path / scale)(TOKENS)), expected)
    assert distance["absmax"] < 0.4
    assert distance["mse"] < 0.4


def test_a_dense_layer_of_any_name_and_what_is_ignored(tmp_path, source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.shared_expert_gate.weight"] = np.ones((1, 64), ml_dtypes.bfloat16)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, ml_dtypes.bfloat16)
    tensors["visual.layers.0.fc.weight"] = np.ones((32, 64), ml_dtypes.bfloat16)
    tensors["projector.weight"] = np.ones((32, 64), ml_dtypes.bfloat16)
    tensors["model.layers.0.conv.weight"] = np.ones((4, 1, 3), ml_dtypes.bfloat16)
    tensors["steps"] = np.array(7, np.int64)
    directory = tmp_path / "source"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    shutil.copy(source / "config.json", directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"old")
    ignore = ("model.layers.1", "re:.*k_proj$")
    quantize_checkpoint(directory, tmp_path / "out", QuantizeOptions(32, ignore=ignore))
    made = load_file(tmp_path / "out" / "model.safetensors")
    packed = {name.removesuffix(".weight_packed") for name in made if name.endswith("_packed")}
    layer = "model.layers.0"
    assert packed == {
        *(f"{layer}.self_attn.{x}_proj" for x in "qvo"),
        *(f"{layer}.mlp.experts.{e}.{x}_proj" for e in range(2) for x in ("gate", "up", "down")),
    }
    assert made["steps"] == 7
    assert np.array_equal(made[f"{layer}.self_attn.q_proj.bias"], tensors[f"{layer}.self_attn.q_proj.bias"])
    assert sorted(files_of(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        "quantization_report.json",
        "tokenizer.json",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    # Hugging Face tools match exact names and expressions alone: each matrix left alone must be among them.
    assert "model.layers.1.self_attn.q_proj" in config["ignore"]
    assert "projector" in config["ignore"]
    assert "lm_head" in config["ignore"]


def test_shards_have_an_index_and_the_same_tensors(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "one", QuantizeOptions(32))
    quantize_checkpoint(source, tmp_path / "many", QuantizeOptions(32, max_shard_bytes=8000))
    shards = sorted((tmp_path / "many").glob("model-*.safetensors"))
    assert len(shards) > 5
    assert not (tmp_path / "many" / "model.safetensors").exists()
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    one, many = load_file(tmp_path / "one" / "model.safetensors"), {}
    for shard in shards:
        tensors = load_file(shard)
        assert {index["weight_map"][name] for name in tensors} == {shard.name}
        many |= tensors
    assert one.keys() == many.keys()
    assert all(np.array_equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in one.values())
    assert np.array_equal(load_model(tmp_path / "one")(TOKENS), load_model(tmp_path / "many")(TOKENS))


def test_sharded_sources_and_large_tensors_in_pieces(tmp_path, source, monkeypatch):
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    directory = tmp_path / "source"
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantize_checkpoint(source, tmp_path / "a", QuantizeOptions(32, scale="mse"))
    monkeypatch.setattr("jax_w4a8.checkpoint.tensors._PIECE_BYTES", 2000)
    quantize_checkpoint(directory, tmp_path / "b", QuantizeOptions(32, scale="mse"))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)


def fuse(tensors, layer, transposed, interleaved, biases=None):
    """Replaces a layer's experts by fused tensors."""
    prefix = f"model.layers.{layer}.mlp.experts"
    experts = sorted({name.split(".")[5] for name in tensors if name.startswith(f"{prefix}.")}, key=int)

    def stack(name, kind="weight"):
        return np.stack([tensors.pop(f"{prefix}.{e}.{name}.{kind}") for e in experts])

    def join(gate, up):
        pair = np.stack([gate, up], 2 if interleaved else 1)
        return pair.reshape(len(experts), -1, *gate.shape[2:])

    fused, down = join(stack("gate_proj"), stack("up_proj")), stack("down_proj")
    swap = (lambda x: np.ascontiguousarray(x.swapaxes(1, 2))) if transposed else lambda x: x
    tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = swap(fused), swap(down)
    if biases:
        tensors[f"{prefix}.gate_up_proj_bias"] = join(stack("gate_proj", "bias"), stack("up_proj", "bias"))
        tensors[f"{prefix}.down_proj_bias"] = stack("down_proj", "bias")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_fused_experts_give_the_file_of_separate_ones(tmp_path, source, transposed, model_type):
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"model_type": model_type}
    biases = model_type == "gpt_oss"
    if biases:
        rng = np.random.default_rng(0)
        for layer in range(2):
            for expert in range(2):
                for name, size in (("gate_proj", 32), ("up_proj", 32), ("down_proj", 64)):
                    tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.bias"] = rng.standard_normal(
                        size
                    ).astype(ml_dtypes.bfloat16)
    for name in ("separate", "fused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        if name == "fused":
            for layer in range(2):
                fuse(tensors, layer, transposed, model_type == "gpt_oss", biases)
        save_file(tensors, tmp_path / name / "model.safetensors")
        quantize_checkpoint(tmp_path / name, tmp_path / f"{name}-out", QuantizeOptions(32))
    separate, fused = (load_file(tmp_path / f"{n}-out" / "model.safetensors") for n in ("separate", "fused"))
    assert separate.keys() == fused.keys()
    assert all(np.array_equal(separate[name], fused[name]) for name in separate)
    assert f"{EXPERT}.weight_packed" in fused


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "compressed_tensors"))),
    reason="torch and compressed-tensors are not installed",
)
@pytest.mark.parametrize(
    ("group_size", "scale", "storage"), [(32, "absmax", "pack"), (64, "mse", "int"), (-1, "mse", "pack")]
)
def test_compressed_tensors_reads_the_same_weights(tmp_path, source, group_size, scale, storage):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationConfig
        from safetensors.torch import load_file as load_torch
    out = tmp_path / "out"
    ignore = ("re:.*down_proj$",) if group_size == 64 else ()
    report = quantize_checkpoint(source, out, QuantizeOptions(group_size, storage, scale, ignore))
    raw = json.loads((out / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(f"{storage}-quantized")
    tensors = load_torch(out / "model.safetensors")
    for module in report.modules:
        prefix = f"{module.name}."
        state = {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
        theirs = compressor.decompress(state, scheme)["weight"].float().numpy()
        mine = quantized(out, module.name, *module.shape)
        # Their product of code and scale is rounded to the scale's dtype.
        product = np.asarray(mine.dequantize()).astype(mine.scale.dtype).astype(np.float32)
        assert np.array_equal(theirs, product)


# ---------------------------------------------------------------------------------------------------------
# Runs that end early.


KILLED = """
import sys, time
from jax_w4a8.checkpoint.quantizer import QuantizeOptions, quantize_checkpoint

def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.02)

quantize_checkpoint(sys.argv[1], sys.argv[2], QuantizeOptions(32, scale="mse", max_shard_bytes=8000), slowly)
"""


def test_ten_kills_at_random_moments_leave_the_same_files(tmp_path, source):
    options = QuantizeOptions(32, scale="mse", max_shard_bytes=8000)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    quantize_checkpoint(source, tmp_path / "whole", options)
    expected = files_of(tmp_path / "whole")
    out, moments = tmp_path / "killed", random.Random(0)
    done = []
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, source, out], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, "the quantiser ended before it began"
        done.append(int(first))
        time.sleep(moments.uniform(0, 0.25))
        process.kill()
        process.communicate()
        assert process.returncode == -9
        for name, content in files_of(out).items():  # whatever has its name is whole
            if name in expected:
                assert content == expected[name], name
        with pytest.raises(CheckpointError, match=r"config\.json is missing"):
            Checkpoint(out)
    assert done == sorted(done)
    assert done[-1] > 0, "no run went on where another had been killed"
    quantize_checkpoint(source, out, options)
    assert files_of(out) == expected


def test_an_error_leaves_no_file_of_that_name(tmp_path):
    with SafetensorsWriter(tmp_path / "x.safetensors", [TensorSpec("a", (2, 3), "F32")]) as writer:
        writer.write("a", np.ones((1, 3), np.float32))
        with pytest.raises(ValueError, match="'a' must be F32, got float64"):
            writer.write("a", np.ones((1, 3)))
        with pytest.raises(ValueError, match="more values than it has"):
            writer.write("a", np.ones((2, 3), np.float32))
        with pytest.raises(ValueError, match=r"tensors \['a'\] are not complete"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_a_written_file_is_what_the_safetensors_package_reads(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "b": rng.integers(-8, 8, (3, 5)).astype(np.int8),
        "a": rng.standard_normal((4, 3)).astype(np.float32),
        "scalar": np.array(3, np.int64),
        "none": np.zeros((0, 4), ml_dtypes.bfloat16),
        "h": rng.standard_normal(7).astype(np.float16),
    }
    names = {"b": "I8", "a": "F32", "scalar": "I64", "none": "BF16", "h": "F16"}
    file = tmp_path / "x.safetensors"
    with SafetensorsWriter(file, [TensorSpec(n, v.shape, names[n]) for n, v in values.items()]) as writer:
        for name, value in values.items():
            for row in value if value.ndim else [value]:
                writer.write(name, row)
        writer.commit()
    assert list(tmp_path.iterdir()) == [file]
    with safe_open(file, framework="numpy") as made:
        for name, value in values.items():
            assert made.get_tensor(name).dtype == value.dtype
            assert np.array_equal(made.get_tensor(name), value)


def interrupted(source, out, options, after=6):
    """A run that an error ends."""
    calls = iter(range(after))

    def stop(done, total):
        next(calls)

    with pytest.raises((StopIteration, RuntimeError)):
        quantize_checkpoint(source, out, options, stop)


def test_an_unfinished_run_goes_on_only_as_it_was_begun(tmp_path, source):
    options = QuantizeOptions(32, max_shard_bytes=8000)
    interrupted(source, tmp_path, options, after=12)
    left = files_of(tmp_path)
    assert "quantize.journal.json" in left
    with pytest.raises(FileExistsError, match="unfinished run with other options"):
        quantize_checkpoint(source, tmp_path, QuantizeOptions(32, max_shard_bytes=9000))
    assert files_of(tmp_path) == left
    seen = []
    quantize_checkpoint(source, tmp_path, options, lambda done, total: seen.append((done, total)))
    assert seen[0][0] > 0
    assert seen[-1][0] == seen[-1][1]
    with pytest.raises(FileExistsError, match="is not empty: it holds config"):
        quantize_checkpoint(source, tmp_path, options)


def test_too_little_space_is_known_before_anything_is_written(tmp_path, source, monkeypatch):
    free = SimpleNamespace(total=10**9, used=0, free=1 << 20)
    monkeypatch.setattr(quantizer_module.shutil, "disk_usage", lambda path: free)
    with pytest.raises(OSError, match=r"needs 0\.02 GiB more, but only 0\.00 GiB are free"):
        quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(32))
    assert list((tmp_path / "out").iterdir()) == []


def test_two_runs_at_once_are_refused(tmp_path, source):
    fcntl = pytest.importorskip("fcntl")
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(FileExistsError, match="another run is writing"):
            quantize_checkpoint(source, tmp_path, QuantizeOptions(32))
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------------
# Bad input.


def damaged(source, directory, edit=lambda tensors: None, config=lambda config: None):
    fields, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    edit(tensors)
    config(fields)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "model.safetensors")
    return directory


def set_value(name, index, value):
    def edit(tensors):
        tensors[name][index] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "config", "message"),
    [
        (set_value(f"{MODULE}.weight", (1, 2), np.nan), {}, f"'{MODULE}.weight' holds NaN or infinity"),
        (set_value(f"{MODULE}.weight", (63, 63), -np.inf), {}, f"'{MODULE}.weight' holds NaN or infinity"),
        (
            lambda t: t.update({f"{MODULE}.weight": np.zeros((64, 64), np.uint8)}),
            {},
            f"'{MODULE}.weight' is U8; the quantiser starts from floating point",
        ),
        (None, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is there"),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers" in name],
            {},
            "has no linear maps of decoder layers left",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": np.ones((2, 3, 5), np.float32)}),
            {},
            r"fused experts 'model.layers.0.mlp.experts' \[2, 3, 5\] don't fit hidden_size 64",
        ),
    ],
)
def test_a_source_that_cannot_be_quantised_is_named(tmp_path, source, edit, config, message):
    bad = damaged(source, tmp_path / "bad", edit or (lambda t: None), lambda fields: fields.update(config))
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(bad, tmp_path / "out", QuantizeOptions(32))
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_width_that_groups_do_not_divide_is_refused(tmp_path, source):
    message = r"group_size 64 doesn't divide .* of 4 modules.*experts\.0\.down_proj \(width 32\)"
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(64))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size must be -1"),
        ({"group_size": 1}, "group_size must be -1"),
        ({"group_size": 48}, "group_size must be -1"),
        ({"format": "gptq"}, r"format must be one of \['pack', 'int'\], got 'gptq'"),
        ({"scale": "median"}, r"scale must be one of \['absmax', 'mse'\], got 'median'"),
        ({"max_shard_bytes": 0}, "max_shard_bytes must be positive"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizeOptions(**options)


def test_places_that_make_no_sense(tmp_path, source):
    with pytest.raises(CheckpointError, match="is not a directory"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(FileExistsError, match="is the source itself"):
        quantize_checkpoint(source, source, QuantizeOptions(32))
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is not a directory"):
        quantize_checkpoint(source, tmp_path / "file", QuantizeOptions(32))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine.partial")
    with pytest.raises(FileExistsError, match="is not empty: it holds thesis"):
        quantize_checkpoint(source, tmp_path / "full", QuantizeOptions(32))
    assert files_of(tmp_path / "full") == {"thesis.txt": b"mine.partial"}
    with pytest.raises(ValueError, match=r"'re:\(', not a regular expression"):
        quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(32, ignore=("re:(",)))


def test_the_command(tmp_path, source, capsys):
    command = ["quantize", str(source), str(tmp_path / "a"), "--group-size", "32"]
    assert main([*command, "--scale", "mse", "--format", "int"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["layer", "model.layers.0", "model.layers.1", "all"]
    command[2] = str(tmp_path / "b")
    assert main([*command, "--json", "--ignore", "re:.*k_proj$", "re:.*v_proj$"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "b" / "quantization_report.json").read_text())
    assert report["options"] == {"group_size": 32, "format": "pack", "scale": "absmax"}
    names = [module["name"] for module in report["modules"]]
    assert MODULE in names
    assert not any(name.endswith(("k_proj", "v_proj")) for name in names)
    assert all(0 < module["relative_error"] < 0.2 for module in report["modules"])
    assert main(command) == 2
    assert "error: " in capsys.readouterr().err
    assert main(["quantize", str(source), str(tmp_path / "c"), "--shard-size", "0"]) == 2
    assert "--shard-size must be a positive number" in capsys.readouterr().err
