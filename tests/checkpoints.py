"""Checkpoints for tests: those of other tools, damaged copies of them, and small ones of any shape."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "golden"
QWEN3_MOE = [f"qwen3_moe-{group}-{form}" for group in ("g32", "g64", "channel") for form in ("pack", "int")]

Tensors = dict[str, np.ndarray]


def golden(name: str) -> Path | None:
    """A checkpoint of other tools, or None where the project's reference data is absent."""
    found = [root / name for root in (DATA, SHARED) if (root / name / "model.safetensors").exists()]
    return found[0] if found else None


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 distance of ``a`` from ``b``."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def read_tensors(directory: Path) -> Tensors:
    with safe_open(directory / "model.safetensors", framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write(directory: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.array(value, order="C") for name, value in tensors.items()}, directory / file)
    return directory


def edited(
    directory: Path,
    config: Callable[[dict[str, Any]], Any] = lambda config: None,
    tensors: Callable[[Tensors], Any] = lambda tensors: None,
    source: str = "qwen3_moe-g32-pack",
) -> Path:
    """A copy of one of ``tests/data`` after edits of its configuration and tensors."""
    fields = json.loads((DATA / source / "config.json").read_text())
    values = read_tensors(DATA / source)
    config(fields)
    tensors(values)
    return write(directory, fields, values)


def scheme(config: dict[str, Any]) -> dict[str, Any]:
    """The one config group of a configuration."""
    return config["quantization_config"]["config_groups"]["group_0"]


def quantization(group_size: int | None = 32, storage: str = "pack-quantized") -> dict[str, Any]:
    """A ``quantization_config`` as Hugging Face tools write it."""
    config = json.loads((DATA / "qwen3_moe-g32-pack" / "config.json").read_text())
    result = copy.deepcopy(config["quantization_config"])
    group = scheme(config | {"quantization_config": result})
    result["format"] = group["format"] = storage
    group["weights"] |= {"group_size": group_size, "strategy": "group" if group_size else "channel"}
    return result


def random_codes(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.integers(-8, 8, (rows, columns)).astype(np.int8)


def pack_words(codes: np.ndarray) -> np.ndarray:
    """int32 ``[N, ceil(K / 8)]``, one code after the other."""
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for column in range(columns):
        nibble = (codes[:, column].astype(np.int32) + 8).astype(np.uint32)
        words[:, column // 8] |= nibble << np.uint32(4 * (column % 8))
    return words.view(np.int32)


def quantized_tensors(
    name: str, codes: np.ndarray, scale: np.ndarray, storage: str = "pack-quantized"
) -> Tensors:
    """The tensors of one quantised linear map."""
    if storage == "int-quantized":
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    return {
        f"{name}.weight_packed": pack_words(codes),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": np.array(codes.shape, np.int64),
    }


def random_linear(
    name: str,
    rows: int,
    columns: int,
    *,
    group_size: int | None = 32,
    storage: str = "pack-quantized",
    scale_dtype: Any = ml_dtypes.bfloat16,
    seed: int = 0,
) -> Tensors:
    rng = np.random.default_rng(seed)
    groups = 1 if group_size is None else -(-columns // group_size)
    scale = (rng.uniform(0.5, 1.5, (rows, groups)) * 0.02).astype(scale_dtype)
    return quantized_tensors(name, random_codes(rng, rows, columns), scale, storage)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a random Qwen3-MoE, every layer MoE."""

    hidden: int = 64
    intermediate: int = 32
    experts: int = 2
    top_k: int = 1
    layers: int = 1
    vocabulary: int = 64

    def config(self) -> dict[str, Any]:
        """Its ``config.json``, without ``quantization_config``."""
        config = json.loads((DATA / "qwen3_moe-g32-pack" / "config.json").read_text())
        del config["quantization_config"]
        return config | {
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "mlp_only_layers": [],
            "vocab_size": self.vocabulary,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        }

    def modules(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Name, shape of the weight, and whether W4A8 checkpoints quantise it."""
        hidden = self.hidden
        yield "model.embed_tokens", (self.vocabulary, hidden), False
        yield "lm_head", (self.vocabulary, hidden), False
        yield "model.norm", (hidden,), False
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm", (hidden,), False
            yield f"{prefix}.post_attention_layernorm", (hidden,), False
            yield f"{prefix}.self_attn.q_norm", (32,), False
            yield f"{prefix}.self_attn.k_norm", (32,), False
            yield f"{prefix}.self_attn.q_proj", (64, hidden), True
            yield f"{prefix}.self_attn.k_proj", (32, hidden), True
            yield f"{prefix}.self_attn.v_proj", (32, hidden), True
            yield f"{prefix}.self_attn.o_proj", (hidden, 64), True
            yield f"{prefix}.mlp.gate", (self.experts, hidden), False
            for expert in range(self.experts):
                module = f"{prefix}.mlp.experts.{expert}"
                yield f"{module}.gate_proj", (self.intermediate, hidden), True
                yield f"{module}.up_proj", (self.intermediate, hidden), True
                yield f"{module}.down_proj", (hidden, self.intermediate), True


def random_model(directory: Path, *, group_size: int = 32, seed: int = 0, **sizes: int) -> Path:
    """A random Qwen3-MoE of ``Sizes(**sizes)``, quantised."""
    model = Sizes(**sizes)
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape, quantized in model.modules():
        if quantized:
            tensors.update(random_linear(name, *shape, group_size=group_size, seed=len(tensors)))
        else:
            values = rng.standard_normal(shape) * 0.1 + (len(shape) == 1)
            tensors[f"{name}.weight"] = values.astype(ml_dtypes.bfloat16)
    return write(directory, model.config() | {"quantization_config": quantization(group_size)}, tensors)


def float_model(
    directory: Path, *, dtype: Any = ml_dtypes.bfloat16, seed: int = 0, layers: int = 2, **sizes: int
) -> Path:
    """As :func:`random_model`, in floating point, with tails as heavy as trained weights have."""
    model = Sizes(layers=layers, **sizes)
    rng = np.random.default_rng(seed)
    tensors: Tensors = {
        f"{name}.weight": (rng.standard_t(5, shape) * 0.1 + (len(shape) == 1)).astype(dtype)
        for name, shape, _ in model.modules()
    }
    return write(directory, model.config(), tensors)
