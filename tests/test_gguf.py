"""GGUF files, written by the ``gguf`` package's own writer and quantiser."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_w4a8.checkpoint import Checkpoint, CheckpointError
from jax_w4a8.checkpoint import gguf_file as gguf_module
from jax_w4a8.cli import main
from jax_w4a8.models import default_model_path, load_model
from jax_w4a8.models.text import load_tokenizer

from .checkpoints import float_model, quantization, relative, write
from .qwen3_reference import Reference

gguf = pytest.importorskip("gguf")

Types = gguf.GGMLQuantizationType
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}


def expert_names(layer: int, projection: str, count: int) -> list[str]:
    return [f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj.weight" for e in range(count)]


def gguf_tensors(source):
    """float32 tensors of a model, by the names of GGUF."""
    config = json.loads((source / "config.json").read_text())
    stored = {
        name: value.astype(np.float32) for name, value in load_file(source / "model.safetensors").items()
    }
    tensors = {}
    for name, value in stored.items():
        module = name.removesuffix(".weight")
        if module in NAMES:
            tensors[f"{NAMES[module]}.weight"] = value
        elif ".experts." not in module:
            _, _, layer, rest = module.split(".", 3)
            tensors[f"blk.{layer}.{NAMES[rest]}.weight"] = value
    for layer in range(config["num_hidden_layers"]):
        for projection in ("gate", "up", "down"):
            names = expert_names(layer, projection, config["num_local_experts"])
            tensors[f"blk.{layer}.ffn_{projection}_exps.weight"] = np.stack([stored[n] for n in names])
    return config, tensors


def type_of(name, value, quantized):
    if value.ndim == 1 or "ffn_gate_inp" in name:
        return Types.F32
    return quantized.get(name.split(".")[-2], quantized["default"])


def write_gguf(file, source, *, quantized=None, metadata=lambda writer: None, edit=lambda tensors: None):
    """A GGUF file of a Qwen3-MoE; its tensors as they were stored."""
    config, tensors = gguf_tensors(source)
    edit(tensors)
    quantized = {"default": Types.Q4_0, "token_embd": Types.Q8_0, "output": Types.Q6_K} | (quantized or {})
    writer = gguf.GGUFWriter(file, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    metadata(writer)
    stored = {}
    for name, value in tensors.items():
        kind = type_of(name, value, quantized)
        if kind.name in ("Q6_K", "Q4_K"):  # which the package reads but doesn't write
            raw = random_superblocks(value.shape, kind)
        else:
            raw = gguf.quantize(value, kind)
        stored[name] = (kind, raw)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def random_superblocks(shape, kind):
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, nbytes)).astype(np.uint8)
    raw[..., -2:] = np.array([0.0005], np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf") / "source"
    float_model(directory, hidden=256, intermediate=64, experts=4, layers=1, vocabulary=96)
    config = json.loads((directory / "config.json").read_text())
    config |= {"norm_topk_prob": True, "num_experts_per_tok": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return file, write_gguf(file, source)


def as_compressed_tensors(directory, source, stored):
    """The same weights as an int-quantized directory, by the gguf package's own dequantisation."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization(32, "int-quantized")
    tensors = {}

    def add(module, kind, raw):
        values = gguf.dequantize(raw, kind)
        if kind != Types.Q4_0:
            tensors[f"{module}.weight"] = values
            return
        scale = (
            raw.reshape(*raw.shape[:-1], -1, 18)[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
        )
        divisor = np.where(scale == 0, 1, scale)[..., None]
        codes = np.rint(values.reshape(*values.shape[:-1], -1, 32) / divisor).reshape(values.shape)
        tensors[f"{module}.weight"] = codes.astype(np.int8)
        tensors[f"{module}.weight_scale"] = scale

    hugging_face = {ours: theirs for theirs, ours in NAMES.items()}
    for name, (kind, raw) in stored.items():
        parts = name.split(".")
        if parts[0] != "blk":
            add(hugging_face[parts[0]], kind, raw)
        elif parts[2].endswith("_exps"):
            projection = parts[2].split("_")[1]
            for module, matrix in zip(expert_names(int(parts[1]), projection, len(raw)), raw, strict=True):
                add(module.removesuffix(".weight"), kind, matrix)
        else:
            add(f"model.layers.{parts[1]}.{hugging_face[parts[2]]}", kind, raw)
    return write(directory, config, tensors)


def test_weights_are_those_of_the_gguf_package(written):
    file, stored = written
    checkpoint = Checkpoint(file)
    kind, raw = stored["blk.0.attn_q.weight"]
    made = checkpoint.linear("model.layers.0.self_attn.q_proj", 64, 256).read_quantized()
    assert kind == Types.Q4_0
    assert made.group_size == 32
    assert made.codes.min() == -8
    assert np.array_equal(made.dequantize(), gguf.dequantize(raw, kind))
    _, raw = stored["blk.0.ffn_down_exps.weight"]
    for expert in range(4):
        down = checkpoint.linear(f"model.layers.0.mlp.experts.{expert}.down_proj", 256, 64)
        assert down.scheme.storage == "Q4_0"
        assert np.array_equal(down.read_quantized().dequantize(), gguf.dequantize(raw[expert], Types.Q4_0))
        assert down.nbytes == raw[expert].nbytes
    for name, module, size in (("token_embd", "model.embed_tokens", 96), ("output", "lm_head", 96)):
        kind, raw = stored[f"{name}.weight"]
        read = checkpoint.array(f"{module}.weight", (size, 256)).read()
        assert read.dtype == np.float32
        assert np.array_equal(read, gguf.dequantize(raw, kind))


def test_logits_are_those_of_the_same_weights_in_compressed_tensors_form(written, source, tmp_path):
    file, stored = written
    directory = as_compressed_tensors(tmp_path / "same", source, stored)
    logits = np.asarray(load_model(file, "symmetric")(TOKENS))
    assert np.array_equal(logits, load_model(directory, "symmetric")(TOKENS))
    expected, exact = (Reference(directory, scheme)(TOKENS[0]) for scheme in ("symmetric", None))
    assert relative(logits[0], expected) < 0.005
    assert 3 * relative(logits[0], expected) <= relative(logits[0], exact)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "BF16", "F32"])
def test_other_types_run_in_floating_point(tmp_path, source, kind):
    """Beside Q4_0 experts, and in experts beside Q4_0 attention."""
    file = tmp_path / "model.gguf"
    quantized = {"attn_q": Types[kind], "ffn_down_exps": Types[kind]} | dict.fromkeys(
        ("ffn_gate_exps", "ffn_up_exps"), Types[kind]
    )
    stored = write_gguf(file, source, quantized=quantized)
    checkpoint = Checkpoint(file)
    values = checkpoint.linear("model.layers.0.self_attn.q_proj", 64, 256).read()
    assert values.dtype == {"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(kind, np.float32)
    expected = gguf.dequantize(stored["blk.0.attn_q.weight"][1], Types[kind])
    assert np.array_equal(values.astype(np.float32), expected)
    if kind == "Q8_0":
        logits = load_model(file, "symmetric")(TOKENS)
        same = load_model(as_mixed(tmp_path / "same", source, stored), "symmetric")(TOKENS)
        assert np.array_equal(logits, same)


def as_mixed(directory, source, stored):
    """As ``as_compressed_tensors``; modules in floating point are ignored by name."""
    as_compressed_tensors(directory, source, stored)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*experts.*", "re:.*q_proj$"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("kind", [Types.Q4_0, Types.F32])
def test_rows_of_llama_s_queries_and_keys_are_put_back(tmp_path, experts, kind):
    rng = np.random.default_rng(0)
    file = tmp_path / "llama.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    weights = {}

    def add(name, *shape, heads=None):
        weights[name] = gguf.dequantize(
            gguf.quantize(rng.standard_normal(shape).astype(np.float32), kind), kind
        )
        stored = weights[name]
        if heads:  # what llama.cpp's converter does to the rows
            stored = (
                stored.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
            )
        raw = gguf.quantize(stored, kind if len(shape) > 1 else Types.F32)
        writer.add_tensor(name, raw, raw_dtype=kind if len(shape) > 1 else Types.F32)

    add("token_embd.weight", 32, 64)
    add("blk.0.attn_q.weight", 64, 64, heads=4)
    add("blk.0.attn_k.weight", 32, 64, heads=2)
    add("blk.0.attn_q.bias", 64, heads=4)
    add("blk.0.attn_v.weight", 32, 64)
    if experts:
        add("blk.0.ffn_gate_inp.weight", experts, 64)
        add("blk.0.ffn_gate_exps.weight", experts, 96, 64)
        for expert in range(experts):
            add(f"blk.0.ffn_up.{expert}.weight", 96, 64)  # as old files have them
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint(file)
    assert checkpoint.config["model_type"] == ("mixtral" if experts else "llama")
    assert checkpoint.config["tie_word_embeddings"]
    assert checkpoint.config["head_dim"] == 16

    def read(module, rows):
        value = checkpoint.linear(module, rows, 64).read()
        return np.asarray(value.dequantize() if kind == Types.Q4_0 else value)

    attention = "model.layers.0.self_attn"
    for name, rows in (("q", 64), ("k", 32), ("v", 32)):
        assert np.array_equal(read(f"{attention}.{name}_proj", rows), weights[f"blk.0.attn_{name}.weight"])
    bias = checkpoint.array(f"{attention}.q_proj.bias", (64,)).read()
    assert np.array_equal(bias, weights["blk.0.attn_q.bias"])
    for expert in range(experts):
        module = f"model.layers.0.block_sparse_moe.experts.{expert}"
        assert np.array_equal(read(f"{module}.w1", 96), weights["blk.0.ffn_gate_exps.weight"][expert])
        assert np.array_equal(read(f"{module}.w3", 96), weights[f"blk.0.ffn_up.{expert}.weight"])


def rope(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_eos_token_id(7)
    writer.add_eot_token_id(5)


def test_metadata_become_fields(tmp_path, source):
    write_gguf(tmp_path / "m.gguf", source, metadata=rope)
    config = Checkpoint(tmp_path / "m.gguf").config
    theta = json.loads((source / "config.json").read_text())["rope_parameters"]["rope_theta"]
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert config["eos_token_id"] == [5, 7]
    assert config["norm_topk_prob"] is True
    assert config["vocab_size"] == 96
    assert not config["tie_word_embeddings"]


def test_llama_3_s_rotary_factors_are_recognised():
    from jax_w4a8.checkpoint.gguf_names import configuration

    theta, factor = 500000.0, 8.0
    frequencies = theta ** -(np.arange(0, 128, 2) / 128)
    factors = []
    for frequency in frequencies:  # as transformers' _compute_llama3_parameters
        wave = 2 * np.pi / frequency
        smooth = (8192 / wave - 1) / 3
        blended = (1 - smooth) * frequency / factor + smooth * frequency
        scaled = frequency if wave < 8192 / 4 else frequency / factor if wave > 8192 else blended
        factors.append(frequency / scaled)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.embedding_length": 4096,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": [8, 8],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 131072,
        "llama.feed_forward_length": 14336,
        "llama.rope.freq_base": theta,
    }
    shapes = {"token_embd.weight": (128256, 4096)}
    made = configuration(None, metadata, shapes, np.array(factors, np.float32))["rope_parameters"]
    assert made == {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": pytest.approx(8.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(CheckpointError, match="isn't Llama 3's rotary scaling"):
        configuration(None, metadata, shapes, np.linspace(1, 8, 64).astype(np.float32))
    with pytest.raises(CheckpointError, match=r"head_count_kv must be the same in all layers, got \[8, 4\]"):
        configuration(None, metadata | {"llama.attention.head_count_kv": [8, 4]}, shapes, None)


def test_what_cannot_be_read_is_refused_by_name(tmp_path, source):
    file = tmp_path / "m.gguf"
    write_gguf(file, source, quantized={"attn_k": Types.Q4_K})
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_k.weight' is Q4_K; .* must be Q4_0, Q8_0"):
        Checkpoint(file)
    write_gguf(file, source, edit=lambda t: t.update({"blk.0.ssm_a.weight": np.ones((4, 32), np.float32)}))
    with pytest.raises(CheckpointError, match=r"1 tensors belong to no module .*blk\.0\.ssm_a"):
        load_model(file)
    write_gguf(file, source, edit=lambda t: t.pop("blk.0.attn_v.weight"))
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.v_proj.weight' is missing"):
        load_model(file)
    write_gguf(file, source, metadata=lambda w: w.add_uint16("split.count", 3))
    with pytest.raises(CheckpointError, match="is one of 3 parts"):
        Checkpoint(file)
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"general.architecture must be one of .*qwen3moe.*, got 'mamba'"
    ):
        Checkpoint(file)
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf is missing"):
        Checkpoint(tmp_path / "nowhere.gguf")


def test_every_truncation_is_noticed(tmp_path, written):
    content = written[0].read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (0, 3, 30, 200, 2000, len(content) // 2, len(content) - 100):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            Checkpoint(file)
    file.write_bytes(b"\xff" * 4096)
    with pytest.raises(CheckpointError, match="is not a complete GGUF file"):
        Checkpoint(file)


def test_large_tensors_come_in_pieces(written, monkeypatch):
    name = "model.embed_tokens.weight"
    whole = Checkpoint(written[0]).files.read(name)
    monkeypatch.setattr(gguf_module, "_PIECE_BYTES", 3000)
    files = Checkpoint(written[0]).files
    assert len(list(files.pieces(name))) > 3
    assert np.array_equal(files.read(name), whole)


def tokenizer_metadata(writer, **changes):
    tokenizer = json.loads((default_model_path() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)


def test_the_tokenizer_is_that_of_the_model(tmp_path, source):
    file = tmp_path / "m.gguf"
    write_gguf(file, source, metadata=tokenizer_metadata)
    made, expected = load_tokenizer(file), load_tokenizer(default_model_path())
    for text in (
        "And it came to pass in those days, that",
        "  two  spaces\n\nnew line\tand numb3rs 12345!",
        "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN} <|endoftext|>don't",
    ):
        ids = expected.encode(text).ids
        assert made.encode(text).ids == ids
        assert made.decode(ids) == expected.decode(ids)


@pytest.mark.parametrize("changes", [{"model": "llama"}, {"pre": "unheard-of"}])
def test_other_tokenizers_are_refused_by_name(tmp_path, source, changes):
    file = tmp_path / "m.gguf"
    write_gguf(file, source, metadata=lambda writer: tokenizer_metadata(writer, **changes))
    with pytest.raises(CheckpointError, match=f"got '{changes.get('model', 'gpt2')}' with"):
        load_tokenizer(file)


def test_info_describes_a_file(written, capsys):
    assert main(["info", str(written[0])]) == 0
    out = capsys.readouterr().out
    assert "qwen3_moe, 1 layers" in out
    assert "int4 groups of 32, float16 scales, symmetric, Q4_0" in out


def test_without_the_package_its_name_is_said(written, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'jax_w4a8\[gguf\]'"):
        Checkpoint(written[0])
