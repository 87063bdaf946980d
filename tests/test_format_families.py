"""Formats by families: what other tools' tiny models give in their own files, they give in every other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jax_w4a8.checkpoint import Checkpoint
from jax_w4a8.checkpoint.quantizer import QuantizeOptions, quantize_checkpoint
from jax_w4a8.models import load_model

from .checkpoints import DATA, read_tensors, relative, write

gguf = pytest.importorskip("gguf")

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
FAMILIES = [*ARCHITECTURES, "deepseek_v2", "deepseek_v3", "gpt_oss"]
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PROJECTIONS = {
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


def tiny(family: str) -> Path:
    directory = DATA / f"tiny-{family}"
    if not directory.is_dir():
        pytest.skip(f"{directory} is not here")
    return directory


def quantized_modules(directory: Path) -> set[str]:
    return {n.removesuffix(".weight_scale") for n in read_tensors(directory) if n.endswith(".weight_scale")}


def float_tensors(directory: Path) -> dict[str, np.ndarray]:
    """float32 tensors of a quantised model, dequantised."""
    stored = read_tensors(directory)
    tensors = {}
    for name, value in stored.items():
        module, _, kind = name.rpartition(".")
        scale = stored.get(f"{module}.weight_scale")
        if kind in ("weight_scale", "weight_shape"):
            continue
        if scale is None or kind == "bias":
            tensors[name] = value.astype(np.float32)
            continue
        codes = value.astype(np.float32)
        if kind == "weight_packed":
            words = value.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)
            codes = (words & np.uint32(15)).reshape(len(value), -1).astype(np.float32) - 8
            codes = codes[:, : stored[f"{module}.weight_shape"][1]]
        width = codes.shape[1] if scale.shape[1] == 1 else 32
        wide = np.repeat(scale.astype(np.float32), width, 1)[:, : codes.shape[1]]
        tensors[f"{module}.weight"] = codes * wide
    return tensors


def float_directory(directory: Path, family: str) -> Path:
    config = json.loads((tiny(family) / "config.json").read_text())
    del config["quantization_config"]
    return write(directory, config, float_tensors(tiny(family)))


def write_gguf(file: Path, family: str, config: dict, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(file, ARCHITECTURES[family])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("clip_qkv"):
        writer.add_clamp_kqv(config["clip_qkv"])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        if "norm_topk_prob" in config:
            writer.add_expert_weights_norm(config["norm_topk_prob"])
    fused: dict[str, list[str]] = {}
    for name, value in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in GLOBAL:
            writer.add_tensor(f"{GLOBAL[module]}.{kind}", value)
            continue
        _, _, layer, rest = module.split(".", 3)
        if ".experts." in rest:
            fused.setdefault(f"blk.{layer}.ffn_{PROJECTIONS[rest.split('.')[-1]]}_exps.weight", []).append(
                name
            )
            continue
        if ARCHITECTURES[family] == "llama" and rest.endswith(("q_proj", "k_proj")):
            count = heads if rest.endswith("q_proj") else kv_heads
            halves = value.reshape(count, 2, len(value) // count // 2, *value.shape[1:])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        writer.add_tensor(f"blk.{layer}.{NAMES[rest]}.{kind}", value.squeeze())
    for name, parts in fused.items():
        parts.sort(key=lambda part: int(part.split(".experts.")[1].split(".")[0]))
        writer.add_tensor(name, np.stack([tensors[part] for part in parts]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf_gives_the_logits_of_the_directory(tmp_path, family):
    directory = float_directory(tmp_path / "float", family)
    config = json.loads((directory / "config.json").read_text())
    if config["rope_parameters"]["rope_type"] not in ("default", "linear", "yarn"):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        (directory / "config.json").write_text(json.dumps(config))
    write_gguf(tmp_path / "model.gguf", family, config, float_tensors(tiny(family)))
    made = Checkpoint(tmp_path / "model.gguf").config
    assert made["model_type"] == family
    expected = np.asarray(load_model(directory, allow_float=True)(TOKENS))
    assert relative(np.asarray(load_model(tmp_path / "model.gguf")(TOKENS)), expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantised_and_runs(tmp_path, family):
    directory = float_directory(tmp_path / "float", family)
    report = quantize_checkpoint(directory, tmp_path / "out", QuantizeOptions(-1, scale="mse"))
    assert {module.name for module in report.modules} == quantized_modules(tiny(family))
    expected = np.asarray(load_model(directory, allow_float=True)(TOKENS))
    logits = np.asarray(load_model(tmp_path / "out")(TOKENS))
    assert 0 < relative(logits, expected) < 0.5


def test_fused_gpt_oss_gives_the_logits_of_separate_experts(tmp_path):
    directory = float_directory(tmp_path / "separate", "gpt_oss")
    config, tensors = json.loads((directory / "config.json").read_text()), read_tensors(directory)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        count = config["num_local_experts"]
        for kind, end in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (
                np.stack([tensors.pop(f"{prefix}.{expert}.{name}_proj.{kind}") for expert in range(count)])
                for name in ("gate", "up", "down")
            )
            both = np.stack([gate, up], 2).reshape(count, -1, *gate.shape[2:])
            tensors[f"{prefix}.gate_up_proj{end}"] = both if end else both.swapaxes(1, 2)
            tensors[f"{prefix}.down_proj{end}"] = down if end else down.swapaxes(1, 2)
    fused = write(tmp_path / "fused", config, tensors)
    logits = load_model(fused, allow_float=True)(TOKENS)
    assert np.array_equal(logits, load_model(directory, allow_float=True)(TOKENS))
    options = QuantizeOptions(-1)
    quantize_checkpoint(fused, tmp_path / "a", options)
    quantize_checkpoint(directory, tmp_path / "b", options)
    a, b = (read_tensors(tmp_path / name) for name in "ab")
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[name], b[name]) for name in a)
