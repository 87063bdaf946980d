"""The compressed-tensors reader: what it takes, what it refuses, and how it says so.

Names in brackets, as in [C7], are those of the project's list of known faults.
"""

from __future__ import annotations

import copy
import json
import logging

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_w4a8.checkpoint import (
    Checkpoint,
    CheckpointError,
    ExpertStack,
    StoredExperts,
    TensorFiles,
    parse_quantization_config,
    to_device,
)
from jax_w4a8.quantization import QuantizedTensor, unpack_words
from jax_w4a8.weights import pack_experts, pack_linear

from .checkpoints import (
    DATA,
    pack_words,
    quantization,
    quantized_tensors,
    random_codes,
    random_linear,
    scheme,
    write,
)

BFLOAT16 = ml_dtypes.bfloat16
STORAGES = ("pack-quantized", "int-quantized")


def config_of(group_size=32, storage="pack-quantized"):
    return {"quantization_config": quantization(group_size, storage)}


def one_linear(directory, tensors, rows=16, columns=64, **options):
    """Reads the module ``fc`` of a checkpoint that consists of it."""
    checkpoint = Checkpoint(write(directory, config_of(**options), tensors))
    stored = checkpoint.linear("fc", rows, columns)
    checkpoint.finish()
    return stored.read()


def assert_same_packed(a, b):
    for x, y in zip(jax.tree.leaves(pack_linear(a)), jax.tree.leaves(pack_linear(b)), strict=True):
        assert np.array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


# ---------------------------------------------------------------------------------------------------------
# quantization_config.


def edit(path, value):
    """A ``quantization_config`` with one field changed; the path's parts are joined by dots."""
    config = quantization()
    *parents, last = path.split(".")
    target = config
    for part in parents:
        target = target[part]
    if value is KeyError:
        del target[last]
    else:
        target[last] = value
    if path == "format":
        config["config_groups"]["group_0"]["format"] = None
    return config


GROUP = "config_groups.group_0"
WEIGHTS, INPUTS = f"{GROUP}.weights", f"{GROUP}.input_activations"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "gptq"),
        ("quant_method", KeyError),
        ("format", "float-quantized"),
        ("format", "mixed-precision"),
        (f"{GROUP}.format", "marlin-24"),
        (f"{GROUP}.output_activations", {"num_bits": 8}),
        (f"{GROUP}.targets", "Linear"),
        (f"{GROUP}.targets", KeyError),
        (f"{GROUP}.targets", ["re:("]),
        (f"{GROUP}.unheard_of", {"rank": 8}),
        ("ignore", "lm_head"),
        ("config_groups", {}),
        ("config_groups", [1]),
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}),
        (WEIGHTS, None),
        (f"{WEIGHTS}.num_bits", 3),
        (f"{WEIGHTS}.num_bits", 8),
        (f"{WEIGHTS}.num_bits", "4"),
        (f"{WEIGHTS}.num_bits", KeyError),
        (f"{WEIGHTS}.type", "float"),
        (f"{WEIGHTS}.symmetric", False),
        (f"{WEIGHTS}.dynamic", True),
        (f"{WEIGHTS}.strategy", "tensor"),
        (f"{WEIGHTS}.strategy", "block"),
        (f"{WEIGHTS}.strategy", None),
        (f"{WEIGHTS}.block_structure", [128, 128]),
        (f"{WEIGHTS}.actorder", "group"),  # [C7]
        (f"{WEIGHTS}.actorder", "dynamic"),
        (f"{WEIGHTS}.actorder", True),
        (f"{WEIGHTS}.group_size", 0),
        (f"{WEIGHTS}.group_size", 1),
        (f"{WEIGHTS}.group_size", -1),
        (f"{WEIGHTS}.group_size", -2),
        (f"{WEIGHTS}.group_size", 48),
        (f"{WEIGHTS}.group_size", None),
        (f"{WEIGHTS}.group_size", "32"),
        (f"{WEIGHTS}.group_size", True),
        (f"{WEIGHTS}.codebook", "nf4"),
        (INPUTS, None),  # W4A16 [C20]
        (f"{INPUTS}.num_bits", 4),
        (f"{INPUTS}.num_bits", 16),
        (f"{INPUTS}.type", "float"),  # W4AFP8
        (f"{INPUTS}.dynamic", False),  # static
        (f"{INPUTS}.dynamic", "local"),
        (f"{INPUTS}.strategy", "tensor"),
        (f"{INPUTS}.strategy", "group"),
        (f"{INPUTS}.group_size", 128),
    ],
)
def test_other_schemes_are_refused_by_field_and_value(path, value):
    with pytest.raises(CheckpointError) as error:
        parse_quantization_config(edit(path, value))
    assert f"quantization_config.{path}" in str(error.value)
    if value is not KeyError and not isinstance(value, dict | list):
        spelled = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
        assert spelled in str(error.value)


@pytest.mark.parametrize("raw", [None, [], "compressed-tensors", 3])
def test_a_config_that_is_no_object_is_refused(raw):
    with pytest.raises(CheckpointError, match="quantization_config must be a JSON object"):
        parse_quantization_config(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{WEIGHTS}.actorder", "static"),
        (f"{WEIGHTS}.actorder", "weight"),
        (f"{WEIGHTS}.actorder", KeyError),
        (f"{WEIGHTS}.observer", "mse"),
        (f"{WEIGHTS}.scale_dtype", "torch.bfloat16"),
        (f"{INPUTS}.symmetric", False),
        (f"{INPUTS}.symmetric", True),
        (f"{GROUP}.format", None),
        ("sparsity_config", None),
        ("sparsity_config", {"format": "dense", "global_sparsity": 0.1}),
        ("transform_config", {"config_groups": {}}),
        ("ignore", None),
        ("version", "99.0"),
    ],
)
def test_harmless_variants_are_accepted(path, value):
    found = parse_quantization_config(edit(path, value)).scheme_for("model.layers.0.mlp.up_proj")
    assert found.group_size == 32
    assert found.storage == "pack-quantized"


@pytest.mark.parametrize("size", [None, -1, 0])
def test_every_spelling_of_channelwise(size):
    config = quantization(None)
    config["config_groups"]["group_0"]["weights"]["group_size"] = size
    assert parse_quantization_config(config).scheme_for("fc").group_size == -1


@pytest.mark.parametrize(("size", "fits"), [(64, True), (32, False), (1, False)])
def test_channelwise_group_size_must_be_the_input_width(tmp_path, size, fits):
    config = config_of(None)
    scheme(config)["weights"]["group_size"] = size
    checkpoint = Checkpoint(write(tmp_path, config, random_linear("fc", 16, 64, group_size=None)))
    if fits:
        assert checkpoint.linear("fc", 16, 64).read().group_size == -1
    else:
        with pytest.raises(CheckpointError, match=f"'fc': group_size {size} .* input width 64"):
            checkpoint.linear("fc", 16, 64)


def test_kv_cache_scheme_and_unknown_fields_are_noted(caplog):  # [C19]
    config = quantization() | {"kv_cache_scheme": {"num_bits": 8}, "brand_new": 1}
    with caplog.at_level(logging.WARNING):
        assert parse_quantization_config(config).scheme_for("fc") is not None
    assert "kv_cache_scheme is ignored" in caplog.text
    assert "brand_new" in caplog.text


def test_exact_names_go_before_expressions_before_classes_and_ignore_before_all():
    config = quantization()
    base = config["config_groups"].pop("group_0")

    def group(size, *targets):
        made = copy.deepcopy(base) | {"targets": list(targets)}
        made["weights"]["group_size"] = size
        return made

    config["config_groups"] = {
        "by_class": group(32, "Linear"),
        "by_expression": group(64, r"re:.*\.up_proj$"),
        "by_name": group(96, "a.up_proj", "a.ignored"),
        "too_late": group(128, r"re:a\..*", "Linear"),
    }
    config["ignore"] = ["lm_head", "re:.*ignored$", "Embedding"]
    parsed = parse_quantization_config(config)
    sizes = {n: parsed.scheme_for(n).group_size for n in ("a.up_proj", "b.up_proj", "a.down", "b.down")}
    assert sizes == {"a.up_proj": 96, "b.up_proj": 64, "a.down": 128, "b.down": 32}
    assert parsed.scheme_for("lm_head") is None
    assert parsed.scheme_for("a.ignored") is None
    assert parsed.scheme_for("model.embed", "Embedding") is None
    assert parsed.scheme_for("b.down", "LayerNorm") is None


def test_a_group_s_own_format_wins(tmp_path):
    config = config_of()
    config["quantization_config"]["format"] = "mixed-precision"
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"]) | {"targets": ["b"], "format": "int-quantized"}
    tensors = random_linear("a", 16, 64) | random_linear("b", 16, 64, storage="int-quantized")
    checkpoint = Checkpoint(write(tmp_path, config, tensors))
    stored = [checkpoint.linear(name, 16, 64) for name in "ab"]
    checkpoint.finish()
    assert_same_packed(stored[0].read(), stored[1].read())


# ---------------------------------------------------------------------------------------------------------
# Quantised tensors.


@pytest.mark.parametrize("columns", [64, 80, 100])
@pytest.mark.parametrize("group_size", [32, None])
def test_both_storages_give_the_same_weights(tmp_path, columns, group_size):  # [C1] [C11]
    codes = random_codes(np.random.default_rng(1), 10, columns)
    groups = 1 if group_size is None else -(-columns // group_size)
    scale = np.linspace(-1, 1, 10 * groups).reshape(10, groups).astype(BFLOAT16)  # negative ones too
    read = [
        one_linear(
            tmp_path / storage,
            quantized_tensors("fc", codes, scale, storage),
            10,
            columns,
            group_size=group_size,
            storage=storage,
        )
        for storage in STORAGES
    ]
    for weights in read:
        assert np.array_equal(weights.codes, codes)
        assert np.array_equal(weights.scale, scale)
        assert weights.scale.dtype == scale.dtype
    assert_same_packed(*read)


def test_all_sixteen_codes_survive_packing():  # [A30]
    codes = np.tile(np.arange(-8, 8, dtype=np.int8), (3, 4))
    assert np.array_equal(unpack_words(pack_words(codes), 64), codes)


@pytest.mark.parametrize("code", [8, 9, -9, 127, -128])
def test_a_code_out_of_range_is_an_error(tmp_path, code):  # [C1]
    tensors = random_linear("fc", 16, 64, storage="int-quantized")
    tensors["fc.weight"][3, 5] = code
    with pytest.raises(CheckpointError, match=rf"'fc.weight' must hold codes of \[-8, 7\], found {code}"):
        one_linear(tmp_path, tensors, storage="int-quantized")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_an_error(tmp_path, value):
    tensors = random_linear("fc", 16, 64)
    tensors["fc.weight_scale"][2, 1] = value
    with pytest.raises(CheckpointError, match=r"'fc.weight_scale' holds NaN or infinity"):
        one_linear(tmp_path, tensors)


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("weight_packed", np.zeros((16, 32), np.uint8), r"must be I32, got U8 \[16, 32\]"),
        ("weight_packed", np.zeros((16, 16), np.int32), r"shape \[16, 8\], got \[16, 16\]"),
        ("weight_packed", np.zeros((16, 8), np.int64), "must be I32, got I64"),
        ("weight_packed", np.zeros((16, 8, 1), np.int32), r"shape \[16, 8\], got \[16, 8, 1\]"),
        ("weight_shape", np.array([64, 16], np.int64), r"must hold \[16, 64\], got \[64, 16\]"),
        ("weight_shape", np.array([16, 64], np.float32), "must be I64 or I32, got F32"),
        ("weight_shape", np.array(16, np.int64), r"shape \[2\], got \[\]"),  # [C12]
        ("weight_shape", np.array([1, 16, 64], np.int64), r"shape \[2\], got \[3\]"),
        ("weight_scale", np.ones((16, 1), np.float32), r"shape \[16, 2\], got \[16, 1\]"),
        ("weight_scale", np.ones((16, 4), np.float32), r"shape \[16, 2\], got \[16, 4\]"),
        ("weight_scale", np.ones((2, 16), np.float32), r"shape \[16, 2\], got \[2, 16\]"),
        ("weight_scale", np.ones(16, np.float32), r"shape \[16, 2\], got \[16\]"),
        ("weight_scale", np.ones((16, 2), np.float64), "must be BF16 or F16 or F32, got F64"),
        ("weight_scale", np.ones((16, 2), np.int8), "must be BF16 or F16 or F32, got I8"),
        ("weight_zero_point", np.zeros((16, 2), np.int8), "zero points aren't supported"),  # [C19]
        ("weight_scale", None, "'fc.weight_scale' is missing"),
        ("weight_shape", None, "'fc.weight_shape' is missing"),
        ("weight_packed", None, r"'fc.weight_packed' is missing \(config.json says pack-quantized\)"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, tensor, value, message):  # [C3]
    tensors = random_linear("fc", 16, 64)
    if value is None:
        del tensors[f"fc.{tensor}"]
    else:
        tensors[f"fc.{tensor}"] = value
    with pytest.raises(CheckpointError, match=message) as error:
        one_linear(tmp_path, tensors)
    assert f"fc.{tensor}" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_files_of_the_other_storage_than_the_config_says(tmp_path):
    with pytest.raises(CheckpointError, match=r"'fc.weight_packed' is missing .* hold fc.weight"):
        one_linear(tmp_path / "a", random_linear("fc", 16, 64, storage="int-quantized"))
    with pytest.raises(CheckpointError, match=r"'fc.weight' is missing .* hold fc.weight_packed"):
        one_linear(tmp_path / "b", random_linear("fc", 16, 64), storage="int-quantized")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_weight_shape_may_be_int32_or_int64(tmp_path, dtype):  # [C12]
    tensors = random_linear("fc", 16, 64)
    tensors["fc.weight_shape"] = tensors["fc.weight_shape"].astype(dtype)
    assert one_linear(tmp_path, tensors).shape == (16, 64)


def test_scales_of_every_dtype_mean_the_same(tmp_path):  # [C13]
    weights = []
    for dtype in (BFLOAT16, np.float16, np.float32):
        tensors = random_linear("fc", 16, 64)
        tensors["fc.weight_scale"] = tensors["fc.weight_scale"].astype(dtype)
        weights.append(one_linear(tmp_path / np.dtype(dtype).name, tensors))
        assert weights[-1].scale.dtype == dtype
    assert_same_packed(weights[0], weights[1])
    assert_same_packed(weights[0], weights[2])


def test_scales_beyond_float16_survive(tmp_path):  # [C14]
    tensors = random_linear("fc", 16, 64)
    tensors["fc.weight_scale"][:, 0] = 1e-30
    tensors["fc.weight_scale"][:, 1] = 1e30
    weights = one_linear(tmp_path, tensors)
    scale = pack_linear(weights).scale.astype(np.float64)
    assert np.allclose(scale[:, 0], 1e-30, rtol=1e-2, atol=0)
    assert np.allclose(scale[:, 1], 1e30, rtol=1e-2)


def test_a_short_last_group_counts(tmp_path):  # [C11]
    codes = random_codes(np.random.default_rng(0), 16, 80)
    tensors = quantized_tensors("fc", codes, np.array([[1.0, 2.0, 4.0]] * 16, np.float32))
    expected = codes * np.repeat([1.0, 2.0, 4.0], 32)[:80]
    assert np.array_equal(one_linear(tmp_path / "a", tensors, 16, 80).dequantize(), expected)
    tensors = random_linear("fc", 16, 704, group_size=128)
    assert one_linear(tmp_path / "b", tensors, 16, 704, group_size=128).scale.shape == (16, 6)
    tensors["fc.weight_scale"] = tensors["fc.weight_scale"][:, :5]
    with pytest.raises(CheckpointError, match=r"shape \[16, 6\], got \[16, 5\]"):
        one_linear(tmp_path / "c", tensors, 16, 704, group_size=128)


@pytest.mark.parametrize(
    ("index", "fits"),
    [
        (np.arange(64) // 32, True),
        (np.full(64, -1), True),
        (np.arange(64)[::-1] // 32, False),
    ],
)
def test_a_group_index_may_not_permute(tmp_path, index, fits):  # [C7]
    tensors = random_linear("fc", 16, 64) | {"fc.weight_g_idx": index.astype(np.int32)}
    if fits:
        assert one_linear(tmp_path, tensors).shape == (16, 64)
    else:
        with pytest.raises(CheckpointError, match=r"'fc.weight_g_idx' permutes inputs"):
            one_linear(tmp_path, tensors)


def test_an_ignored_module_stays_in_floating_point(tmp_path):
    config = config_of()
    config["quantization_config"]["ignore"] = ["fc"]
    weight = np.random.default_rng(0).standard_normal((16, 64)).astype(BFLOAT16)
    checkpoint = Checkpoint(write(tmp_path, config, {"fc.weight": weight}))
    stored = checkpoint.linear("fc", 16, 64)
    assert stored.scheme is None
    assert np.array_equal(stored.read(), weight)
    with pytest.raises(CheckpointError, match="'fc' is in floating point"):
        stored.read_quantized()
    checkpoint = Checkpoint(write(tmp_path / "b", config, random_linear("fc", 16, 64)))
    with pytest.raises(CheckpointError, match=r"'fc' is not quantised by config.json"):
        checkpoint.linear("fc", 16, 64)


def test_floating_point_tensors_are_checked(tmp_path):
    values = {name: np.ones((4, 8), np.float32) for name in ("good", "bad", "empty")}
    values["bad"][1, 2] = np.nan
    values["empty"][:] = 0
    checkpoint = Checkpoint(write(tmp_path, config_of(), values | {"codes": np.zeros((4, 8), np.int8)}))
    assert checkpoint.array("good", (4, 8)).read().shape == (4, 8)
    assert not checkpoint.array("empty", (4, 8)).read().any()
    with pytest.raises(CheckpointError, match="'bad' holds NaN"):
        checkpoint.array("bad", (4, 8)).read()
    with pytest.raises(CheckpointError, match="'empty' is all zeros"):
        checkpoint.array("empty", (4, 8), nonzero=True).read()
    with pytest.raises(CheckpointError, match="'codes' must be BF16 or F16 or F32, got I8"):
        checkpoint.array("codes", (4, 8))
    with pytest.raises(CheckpointError, match=r"'good' must have shape \[8, 4\], got \[4, 8\]"):
        checkpoint.array("good", (8, 4))
    with pytest.raises(CheckpointError, match="'none' is missing"):
        checkpoint.array("none", (8, 4))


def test_leftover_tensors_are_listed_up_to_ten(tmp_path):  # [C5]
    tensors = random_linear("fc", 16, 64) | {f"extra.{i:02}": np.ones(1, np.float32) for i in range(14)}
    with pytest.raises(CheckpointError, match=r"14 tensors .*extra\.00.*extra\.09 and 4 more") as error:
        one_linear(tmp_path, tensors)
    assert "extra.10" not in str(error.value)


def test_scales_of_a_quantised_cache_are_ignored_with_a_note(tmp_path, caplog):  # [C19]
    tensors = random_linear("fc", 16, 64)
    for name in ("self_attn.k_scale", "self_attn.v_scale", "k_proj.output_scale"):
        tensors[f"model.layers.0.{name}"] = np.ones(1, np.float32)
    with caplog.at_level(logging.WARNING):
        one_linear(tmp_path, tensors)
    assert "ignored 3 tensors" in caplog.text
    assert "k_scale" in caplog.text


# ---------------------------------------------------------------------------------------------------------
# Files.


def shards(directory, parts, index=None):
    """Writes tensors to several files, with an index unless it is False."""
    for file, tensors in parts.items():
        write(directory, config_of(), tensors, file)
    if index is not False:
        weight_map = {name: file for file, tensors in parts.items() for name in tensors}
        content = json.dumps({"metadata": {}, "weight_map": weight_map | (index or {})})
        (directory / "model.safetensors.index.json").write_text(content)
    return directory


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_parts():
    return {ONE: random_linear("a", 16, 64, seed=1), TWO: random_linear("b", 8, 32, seed=2)}


@pytest.mark.parametrize("index", [None, False])
def test_several_files_with_and_without_an_index(tmp_path, index):  # [C15]
    parts = two_parts()
    checkpoint = Checkpoint(shards(tmp_path, parts, index))
    stored = [checkpoint.linear("a", 16, 64), checkpoint.linear("b", 8, 32)]
    checkpoint.finish()
    for module in (*stored, *stored):  # files are closed and opened again in between
        expected = (parts[ONE] | parts[TWO])[f"{module.name}.weight_packed"]
        assert np.array_equal(module.read().codes, unpack_words(expected, module.in_features))


def test_a_missing_shard_is_named(tmp_path):  # [C15]
    shards(tmp_path, two_parts())
    (tmp_path / TWO).unlink()
    with pytest.raises(CheckpointError, match=f"{TWO} is missing: .*index.json names it for 3 tensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "path", ["/etc/x.safetensors", "../x.safetensors", "a/../../x", "C:\\x", "\\x", "", 3]
)
def test_a_shard_outside_the_directory_is_refused(tmp_path, path):
    shards(tmp_path, two_parts(), {"evil": path})
    with pytest.raises(CheckpointError, match="'evil'"):
        Checkpoint(tmp_path)


def test_an_index_must_fit_the_files(tmp_path):  # [C15]
    shards(tmp_path / "a", two_parts(), {"renamed": TWO})
    with pytest.raises(CheckpointError, match=f"{TWO} lacks 1 tensors .* renamed"):
        Checkpoint(tmp_path / "a")
    parts = two_parts()
    shards(tmp_path / "b", parts)
    write(tmp_path / "b", config_of(), parts[TWO] | {"stale": np.ones(1, np.float32)}, TWO)
    with pytest.raises(CheckpointError, match=f"{TWO} holds 1 tensors .* doesn't name: stale"):
        Checkpoint(tmp_path / "b")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_named(tmp_path, content):
    shards(tmp_path, two_parts())
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_names_both(tmp_path):
    parts = two_parts()
    parts[TWO]["a.weight_scale"] = parts[ONE]["a.weight_scale"]
    with pytest.raises(CheckpointError, match=f"'a.weight_scale' is in two files: .*{ONE} and .*{TWO}"):
        Checkpoint(shards(tmp_path, parts, False))


def test_files_that_are_not_part_of_the_checkpoint_are_noted(tmp_path, caplog):
    write(tmp_path, config_of(), random_linear("fc", 16, 64))
    write(tmp_path, config_of(), random_linear("fc", 16, 64), "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        Checkpoint(tmp_path).linear("fc", 16, 64)
    assert "consolidated.safetensors is not part of the checkpoint" in caplog.text


def test_every_truncation_of_a_file_is_noticed(tmp_path):
    write(tmp_path, config_of(), random_linear("fc", 16, 64))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete safetensors file"):
            Checkpoint(tmp_path)
    for garbage in (b"\xff" * 100, b"PK\x03\x04" + bytes(200), whole + b"more"):
        file.write_bytes(garbage)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            Checkpoint(tmp_path)


def test_missing_and_damaged_configurations_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config\.json can't be read as JSON"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('"text"')
    with pytest.raises(CheckpointError, match="must hold a JSON object, got str"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no quantization_config"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        TensorFiles(tmp_path / "nowhere")


def test_large_tensors_are_read_in_pieces_into_aligned_memory(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "large": rng.standard_normal((9, 1 << 20)).astype(np.float32),
        "long": rng.standard_normal(5 << 20).astype(np.float32),
        "none": np.ones((0, 5), np.float32),
        "scalar": np.float32(7),
    }
    files = TensorFiles(write(tmp_path, {}, {k: np.asarray(v) for k, v in values.items()}))
    for name, value in values.items():
        read = files.read(name)
        assert not read.size or read.ctypes.data % 64 == 0
        assert np.array_equal(read, value)
    assert len(list(files.pieces("large"))) > 1
    assert np.array_equal(np.concatenate(list(files.pieces("large"))), values["large"])


# ---------------------------------------------------------------------------------------------------------
# Experts.


def random_experts(count, seed=0, hidden=80, intermediate=48, group_size=32):
    rng = np.random.default_rng(seed)

    def weights(rows, columns):
        scale = rng.uniform(0.1, 1, (count, rows, -(-columns // group_size))).astype(BFLOAT16)
        codes = rng.integers(-8, 8, (count, rows, columns)).astype(np.int8)
        return QuantizedTensor(codes, scale, group_size)

    return weights(2 * intermediate, hidden), weights(hidden, intermediate)


def pick(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


@pytest.mark.parametrize("count", [1, 3])  # [C16]
def test_a_stack_equals_packing_all_at_once(count):
    w13, w2 = random_experts(count)
    rng = np.random.default_rng(1)
    biases = rng.standard_normal((count, 96)), rng.standard_normal((count, 80))
    stack = ExpertStack(count)
    for expert in reversed(range(count)):
        stack.put(expert, *(pick(part, expert) for part in (w13, w2, *biases)))
    expected = jax.tree.leaves(pack_experts(w13, w2, *biases))
    for made, leaf in zip(jax.tree.leaves(stack.finish()), expected, strict=True):
        assert made.dtype == leaf.dtype
        assert np.array_equal(made, leaf)
        assert made.ctypes.data % 64 == 0


def test_jax_takes_a_stack_over_without_a_copy():
    w13, w2 = random_experts(2)
    stack = ExpertStack(2)
    for expert in range(2):
        stack.put(expert, pick(w13, expert), pick(w2, expert))
    host = stack.finish()
    for array, leaf in zip(jax.tree.leaves(to_device(host)), jax.tree.leaves(host), strict=True):
        if array.device.platform == "cpu":
            assert array.unsafe_buffer_pointer() == leaf.ctypes.data


def test_a_stack_keeps_account():
    w13, w2 = random_experts(2)
    with pytest.raises(ValueError, match="num_experts must be at least 1, got 0"):
        ExpertStack(0)
    stack = ExpertStack(2)
    stack.put(1, pick(w13, 0), pick(w2, 0))
    for expert in (1, 2, -1):
        with pytest.raises(ValueError, match=f"expert {expert} is out of range or was put before"):
            stack.put(expert, pick(w13, 0), pick(w2, 0))
    with pytest.raises(ValueError, match=r"experts \[0\] were never put"):
        stack.finish()
    other = random_experts(1, hidden=64)
    with pytest.raises(ValueError, match="expert 0 differs in sizes"):
        stack.put(0, pick(other[0], 0), pick(other[1], 0))
    wider = QuantizedTensor(w13.codes[0], w13.scale[0].astype(np.float32), 32)
    with pytest.raises(ValueError, match="expert 0 has float32"):
        stack.put(0, wider, pick(w2, 0))


def stored_experts(checkpoint, count=2, hidden=64, intermediate=32):
    def every(name, rows, columns):
        return [checkpoint.linear(f"experts.{e}.{name}", rows, columns) for e in range(count)]

    return StoredExperts(
        "experts",
        every("gate", intermediate, hidden),
        every("up", intermediate, hidden),
        every("down", hidden, intermediate),
    )


def expert_tensors(count=2, hidden=64, intermediate=32):
    tensors = {}
    for expert in range(count):
        for i, (name, *shape) in enumerate(
            [("gate", intermediate, hidden), ("up", intermediate, hidden), ("down", hidden, intermediate)]
        ):
            tensors |= random_linear(f"experts.{expert}.{name}", *shape, seed=3 * expert + i)
    return tensors


def test_stored_experts_are_read_gate_first(tmp_path):  # [C18]
    tensors = expert_tensors()
    checkpoint = Checkpoint(write(tmp_path, config_of(), tensors))
    progress = []
    packed = stored_experts(checkpoint).read(progress.append)
    checkpoint.finish()
    assert sum(progress) == sum(value.nbytes for value in tensors.values())

    def codes(name):
        words = [tensors[f"experts.{e}.{name}.weight_packed"] for e in range(2)]
        return np.stack([unpack_words(w, 32 if name == "down" else 64) for w in words])

    def scale(name):
        return np.stack([tensors[f"experts.{e}.{name}.weight_scale"] for e in range(2)])

    expected = pack_experts(
        QuantizedTensor(
            np.concatenate([codes("gate"), codes("up")], 1),
            np.concatenate([scale("gate"), scale("up")], 1),
            32,
        ),
        QuantizedTensor(codes("down"), scale("down"), 32),
    )
    for made, leaf in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(made, leaf)


def test_experts_must_have_one_scheme(tmp_path):
    tensors = expert_tensors()
    tensors["experts.1.up.weight_scale"] = tensors["experts.1.up.weight_scale"].astype(np.float32)
    with pytest.raises(CheckpointError, match=r"must have one scheme: .*'experts\.1\.up' .* F32"):
        stored_experts(Checkpoint(write(tmp_path / "a", config_of(), tensors)))
    config = config_of()
    groups = config["quantization_config"]["config_groups"]
    groups["other"] = copy.deepcopy(groups["group_0"]) | {"targets": ["re:.*down$"]}
    groups["other"]["weights"]["group_size"] = 64
    tensors = expert_tensors()
    for expert in range(2):
        name = f"experts.{expert}.down.weight_scale"
        tensors[name] = tensors[name][:, :1]
    with pytest.raises(CheckpointError, match=r"must have one scheme: .*'experts\.0\.down'"):
        stored_experts(Checkpoint(write(tmp_path / "b", config, tensors)))


def test_experts_in_floating_point_are_refused(tmp_path):
    config = config_of()
    config["quantization_config"]["ignore"] = ["re:experts.*"]
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    tensors = {f"experts.{e}.{n}.weight": np.ones(s, BFLOAT16) for e in range(2) for n, s in shapes.items()}
    with pytest.raises(CheckpointError, match=r"'experts\.0\.gate' is not quantised"):
        stored_experts(Checkpoint(write(tmp_path, config, tensors)))


def test_another_tool_s_files_are_read_whole():
    """Every tensor of a checkpoint that this package's tests don't write themselves."""
    for name in ("qwen3_moe-g32-pack", "qwen3_moe-channel-int"):
        files = TensorFiles(DATA / name)
        assert {header.dtype for header in files.headers.values()} <= {"BF16", "I8", "I32", "I64"}
        for tensor, header in files.headers.items():
            assert files.read(tensor).shape == header.shape
