"""llama.cpp on a whole model: a GGUF file of random weights, prefill and decode by ``llama_decode``."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.bench.peers.ggml_blocks import BLOCK_BYTES, MULTIPLES
from jax_w4a8.bench.peers.llamacpp import LlamaCpp
from jax_w4a8.bench.work import Array

#: What llama.cpp's own quantiser gives the output matrix beside Q4 weights.
_HEAD_KIND = "q6_K"
_MULTIPLES = {**MULTIPLES, _HEAD_KIND: 256}
_BLOCK_BYTES = {**BLOCK_BYTES, _HEAD_KIND: 210}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe"}
_BASE_BLOCKS = 1 << 16

#: What a model's config.json says.
ModelFields = Mapping[str, Any]


class LlamaCppModel:
    """A model of the same sizes in llama.cpp's format, loaded by it.

    Attributes:
      name: with the weight format.
    """

    def __init__(self, config: ModelFields, peer: LlamaCpp, threads: int, slots: int, folder: Path) -> None:
        """Writes the file and loads it; weights that aren't repacked are read from it, so it must stay.

        Raises:
          ValueError: llama.cpp's architecture for this family isn't known here.
          OSError: the disk has no room for the file.
        """
        import llama_cpp

        self._api: Any = llama_cpp
        self.name = f"llama.cpp {peer.kind.upper()}{' repacked' if peer.repacked else ''}"
        check_architecture(config)
        needed, free = file_bytes(config, peer.kind), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                f"{folder} has {free / 1e9:.1f} GB free, and llama.cpp's file needs {needed / 1e9:.1f} GB"
            )
        path = folder / f"model-{peer.kind}.gguf"
        write_gguf(config, peer.kind, path)
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = peer.repacked
        parameters.n_gpu_layers = 0
        parameters.use_mmap = not peer.repacked
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp couldn't load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = slots
        settings.n_ubatch = 512
        settings.n_threads = settings.n_threads_batch = threads
        settings.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._vocabulary = config["vocab_size"]

    def prefill(self, tokens: Array) -> float:
        """Seconds of one prompt, int32 ``[T]``, from an empty cache."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        return self._decode(tokens)

    def step(self, token: int) -> float:
        """Seconds of one more token."""
        return self._decode(np.array([token % self._vocabulary], np.int32))

    def close(self) -> None:
        """Gives memory back."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _decode(self, tokens: Array) -> float:
        count = len(tokens)
        array = (self._api.llama_token * count)(*tokens.tolist())
        started = time.perf_counter()
        code = self._api.llama_decode(self._context, self._api.llama_batch_get_one(array, count))
        self._api.llama_synchronize(self._context)
        if code != 0:
            raise RuntimeError(f"llama_decode failed with code {code}")
        return time.perf_counter() - started


def check_architecture(config: ModelFields) -> None:
    """Raises ValueError, with the known ones, unless this family's name in llama.cpp is known here."""
    family = config["model_type"]
    if family not in _ARCHITECTURES:
        raise ValueError(f"peer llama.cpp runs whole models of {sorted(_ARCHITECTURES)}, got {family!r}")


def require_gguf() -> None:
    """Raises ImportError unless files of models can be written."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("peer llama.cpp needs gguf to run whole models: pip install gguf")


def _tensors(config: ModelFields, kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and formats of all quantised tensors."""
    hidden = config["hidden_size"]
    heads, kv_heads = (
        config["num_attention_heads"] * config["head_dim"],
        config["num_key_value_heads"] * config["head_dim"],
    )
    yield "token_embd.weight", (config["vocab_size"], hidden), kind
    yield "output.weight", (config["vocab_size"], hidden), _HEAD_KIND
    experts, inner = config["num_experts"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (heads, hidden),
            "attn_k": (kv_heads, hidden),
            "attn_v": (kv_heads, hidden),
            "attn_output": (hidden, heads),
            "ffn_gate_exps": (experts, inner, hidden),
            "ffn_up_exps": (experts, inner, hidden),
            "ffn_down_exps": (experts, hidden, inner),
        }
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", shape, kind


def file_bytes(config: ModelFields, kind: str) -> int:
    """Size of the file that :func:`write_gguf` writes, and about the memory that its weights take."""
    return sum(int(np.prod(_stored_shape(shape, kind))) for _, shape, kind in _tensors(config, kind))


def _stored_shape(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // _MULTIPLES[kind] * _BLOCK_BYTES[kind])


def write_gguf(config: ModelFields, kind: str, path: Path) -> None:
    """Writes a model of random weights, without a tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config["model_type"]])
    _add_sizes(writer, config)
    rng = np.random.default_rng(0)
    floats = dict(_float_tensors(config, rng))
    types = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q4_K": gguf.GGMLQuantizationType.Q4_K}
    types[_HEAD_KIND] = gguf.GGMLQuantizationType.Q6_K
    for name, values in floats.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    for name, shape, one in _tensors(config, kind):
        stored = _stored_shape(shape, one)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=types[one])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in floats.values():
        writer.write_tensor_data(values)
    for _, shape, one in _tensors(config, kind):
        writer.write_tensor_data(_random_blocks(rng, _stored_shape(shape, one), shape[-1], one))
    writer.close()


def _add_sizes(writer: Any, config: ModelFields) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _float_tensors(config: ModelFields, rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    hidden = config["hidden_size"]
    yield "output_norm.weight", np.ones(hidden, np.float32)
    for layer in range(config["num_hidden_layers"]):
        for name, size in (
            ("attn_norm", hidden),
            ("ffn_norm", hidden),
            ("attn_q_norm", config["head_dim"]),
            ("attn_k_norm", config["head_dim"]),
        ):
            yield f"blk.{layer}.{name}.weight", np.ones(size, np.float32)
        router = rng.standard_normal((config["num_experts"], hidden), np.float32) * hidden**-0.5
        yield f"blk.{layer}.ffn_gate_inp.weight", router


def _random_blocks(rng: np.random.Generator, stored: tuple[int, ...], inputs: int, kind: str) -> Array:
    """Random nibbles with scales that give about unit gain; blocks repeat after some megabytes."""
    size, unit = _BLOCK_BYTES[kind], 1 / np.sqrt(inputs)
    total = int(np.prod(stored)) // size
    count = min(total, _BASE_BLOCKS + int(rng.integers(0, 999)))
    base = np.frombuffer(rng.bytes(count * size), np.uint8).reshape(count, size).copy()

    def halves(value: float) -> Array:
        scale = value * rng.uniform(0.75, 1.25, count)
        return np.ascontiguousarray(scale.astype(np.float16))[:, None].view(np.uint8)

    if kind == "q4_0":
        base[:, :2] = halves(unit / 4.6)
    elif kind == "q4_K":
        # All scales and offsets 32, so that offsets take 8 off every code: dmin = 8 d.
        factor = halves(unit / 4.6 / 32)
        base[:, :2] = factor
        base[:, 2:4] = (factor.view(np.float16) * np.float16(8)).view(np.uint8)
        base[:, 4:12] = 32 | (2 << 6)
        base[:, 12:16] = 0
    else:
        base[:, 192:208] = 32
        base[:, 208:210] = halves(unit / 18 / 32)
    blocks = np.resize(base, (total, size))
    return blocks.reshape(stored)
