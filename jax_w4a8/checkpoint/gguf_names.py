"""What GGUF calls things: metadata keys and tensor names, in the terms of Hugging Face checkpoints.

Keys and names are those of the ``gguf`` package (``Keys``, ``TENSOR_NAMES``); what its writers do to tensors
on the way is undone here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError, shortened

#: Architectures, each with its ``model_type`` and whether the chosen experts' weights are normalised, which
#: llama.cpp knows by heart where a file doesn't say so.
_ARCHITECTURES = {
    "llama": ("llama", True),
    "olmoe": ("olmoe", False),
    "qwen2": ("qwen2", False),
    "qwen2moe": ("qwen2_moe", False),
    "qwen3": ("qwen3", False),
    "qwen3moe": ("qwen3_moe", True),
}
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens",
    "output_norm.weight": "model.norm",
    "output.weight": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_PROJECTIONS = {
    "default": {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
}
_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+?)(?:\.(\d+))?\.(weight|bias)")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")
_OLD_EXPERT = re.compile(r"ffn_(gate|up|down)")
#: No size of a model is as large.
_LARGEST = 2**31
#: Llama 3's own rotary scaling, of which a file keeps only the result.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclasses.dataclass(frozen=True)
class Placement:
    """A module's share of a tensor.

    Attributes:
      module, suffix: the module, and what its tensor is called.
      shape: of the share.
      start: where it begins, in runs along the innermost axis.
      rows: the order in which its rows are to be taken, or None.
      dequantized: runs in floating point whatever type it has.
    """

    module: str
    suffix: str
    shape: tuple[int, ...]
    start: int = 0
    rows: np.ndarray[Any, Any] | None = dataclasses.field(default=None, compare=False)
    dequantized: bool = False


def architecture(path: Path, metadata: Mapping[str, Any]) -> str:
    """The file's architecture.

    Raises:
      CheckpointError: it is missing or not one that can be read.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture must be one of {sorted(_ARCHITECTURES)}, got {shortened(name)}"
        )
    return name


def configuration(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: np.ndarray[Any, Any] | None,
) -> dict[str, Any]:
    """The fields of a ``config.json``, from a file's metadata.

    Raises:
      CheckpointError: a key is missing, or asks for what isn't supported.
    """
    return _Metadata(path, metadata).configuration(shapes, rope_factors)


class _Metadata:
    """Metadata of one architecture, by key."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self._architecture = architecture(path, metadata)

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise CheckpointError(f"{self._path}: {self._architecture}.{key} is missing")
        return value

    def _number(self, key: str, kinds: Any = int, default: Any = None) -> Any:
        """A number above 0; ``default`` stands in where there is none."""
        value = self._need(key) if default is None else self._get(key, default)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < _LARGEST:
            raise self._wrong(key, "a positive number", value)
        return value

    def _same(self, key: str) -> int:
        """A whole number that may be given layer by layer."""
        value = self._need(key)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise self._wrong(key, "the same in all layers", value)
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST:
            raise self._wrong(key, "a positive number", value)
        return value

    def _wrong(self, key: str, expected: str, value: Any) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {self._architecture}.{key} must be {expected}, got {shortened(value)}"
        )

    def configuration(
        self, shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray[Any, Any] | None
    ) -> dict[str, Any]:
        model_type, normalized = _ARCHITECTURES[self._architecture]
        experts = self._get("expert_count", 0)
        if not isinstance(experts, int) or not 0 <= experts < _LARGEST:
            raise self._wrong("expert_count", "a number of experts", experts)
        if self._architecture == "llama" and experts:
            model_type = "mixtral"
        hidden, heads = self._number("embedding_length"), self._same("attention.head_count")
        embedding = shapes.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self._path}: tensor 'token_embd.weight' is missing")
        layers = self._number("block_count")
        if layers > len(shapes):  # before anything is made for each of them
            raise self._wrong("block_count", f"at most the number of tensors, {len(shapes)}", layers)
        config = {
            "model_type": model_type,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._same("attention.head_count_kv"),
            "head_dim": self._get("attention.key_length", hidden // heads),
            "vocab_size": embedding[0],
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._need("context_length"),
            "rope_parameters": self._rope(rope_factors),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            "clip_qkv": self._get("attention.clamp_kqv"),
            "eos_token_id": self._end_of_text(),
        }
        window = self._get("attention.sliding_window")
        if window:
            config |= {"sliding_window": window, "use_sliding_window": True}
        width = self._get("feed_forward_length")
        if width is not None:
            config["intermediate_size"] = self._same("feed_forward_length")
        if experts:
            config |= self._mixture(model_type, experts, normalized)
            dense = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in shapes]
            config["mlp_only_layers"] = dense
        return config

    def _mixture(self, model_type: str, experts: int, normalized: bool) -> dict[str, Any]:
        mixture = {
            "num_experts": experts,
            "num_local_experts": experts,
            "num_experts_per_tok": self._need("expert_used_count"),
            "norm_topk_prob": self._get("expert_weights_norm", normalized),
        }
        if model_type in ("qwen2_moe", "qwen3_moe"):
            mixture["moe_intermediate_size"] = self._need("expert_feed_forward_length")
        shared = self._get("expert_shared_feed_forward_length")
        if shared is not None:
            mixture["shared_expert_intermediate_size"] = shared
        return mixture

    def _rope(self, factors: np.ndarray[Any, Any] | None) -> dict[str, Any]:
        theta = self._number("rope.freq_base", (int, float), 10000.0)
        kind = self._get("rope.scaling.type", "none")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if factors is not None:
            return rope | self._llama3(theta, factors)
        if kind == "none":
            return rope
        if kind not in ("linear", "yarn"):
            raise self._wrong("rope.scaling.type", "none, linear or yarn", kind)
        rope |= {"rope_type": kind, "factor": self._need("rope.scaling.factor")}
        original = self._get("rope.scaling.original_context_length")
        if original is not None:
            rope["original_max_position_embeddings"] = original
        return rope

    def _llama3(self, theta: float, factors: np.ndarray[Any, Any]) -> dict[str, Any]:
        """The parameters whose factors these are, if they are Llama 3's."""
        factor = float(factors.max())
        low, high, original = _LLAMA3.values()
        waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.allclose(factors, expected, rtol=1e-4):
            raise CheckpointError(f"{self._path}: tensor 'rope_freqs.weight' isn't Llama 3's rotary scaling")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def _end_of_text(self) -> list[int]:
        keys = ("eos_token_id", "eot_token_id")
        ids = [self._metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        return sorted({i for i in ids if isinstance(i, int)})


def place(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> Iterator[Placement]:
    """The modules that a tensor of the file belongs to; one of an unknown name keeps it.

    Args:
      name: the tensor's name in the file.
      shape: its shape, outermost axis first.
      config: as :func:`configuration` made it.
    """
    if name == "rope_freqs.weight":
        return
    if name in _GLOBAL:
        yield Placement(_GLOBAL[name], "weight", shape, dequantized=True)
        return
    match = _NAME.fullmatch(name)
    if match is None:
        yield Placement(*name.rpartition(".")[::2], shape, dequantized=True)
        return
    layer, stem, number, suffix = match.groups()
    prefix = f"model.layers.{layer}"
    mixtral = config["model_type"] == "mixtral"
    mixture = f"{prefix}.block_sparse_moe" if mixtral else f"{prefix}.mlp"
    projections = _PROJECTIONS["mixtral" if mixtral else "default"]
    experts, old = _EXPERTS.fullmatch(stem), _OLD_EXPERT.fullmatch(stem)
    if experts and len(shape) == 3:
        for expert in range(shape[0]):
            module = f"{mixture}.experts.{expert}.{projections[experts[1]]}"
            yield Placement(module, suffix, shape[1:], start=expert * shape[1])
    elif old and number is not None:
        yield Placement(f"{mixture}.experts.{number}.{projections[old[1]]}", suffix, shape)
    elif stem == "ffn_gate_inp":
        yield Placement(f"{mixture}.gate", suffix, shape)
    elif stem == "ffn_gate_inp_shexp" and len(shape) == 1:  # writers drop axes of size 1
        yield Placement(f"{prefix}.{_LAYER[stem]}", suffix, (1, *shape))
    elif stem in _LAYER and number is None:
        yield Placement(f"{prefix}.{_LAYER[stem]}", suffix, shape, rows=_row_order(stem, shape, config))
    else:
        yield Placement(name.rpartition(".")[0], suffix, shape, dequantized=True)


def _row_order(stem: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> np.ndarray[Any, Any] | None:
    """llama.cpp rotates neighbours in models of Llama's kind, and its writers order rows for that."""
    if config["model_type"] not in ("llama", "mixtral") or stem not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
    if shape[0] % (2 * heads):  # not what the configuration says, which is noticed where it is claimed
        return None
    rows = np.arange(shape[0])
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
