"""Makes the ``tiny-*`` directories and the ``.npz`` files beside this file, with other people's tools alone.

A tiny random model of each family, as Hugging Face transformers defines it, is brought to W4A8 by the rules
in README.md: weights with compressed-tensors' own packing, activations by a fake quantisation that a
``TorchFunctionMode`` puts in front of every product with a quantised weight. It is then run in float32 by
transformers, and written as a compressed-tensors checkpoint under the names that Hugging Face checkpoints
use.

    pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1
    python tests/data/make_references.py [FAMILY ... | rope | double]
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3

HERE = Path(__file__).parent
PROMPT, GREEDY = 24, 16
IGNORE = ["lm_head", "re:.*mlp[.]gate$", "re:.*mlp[.]router$", "re:.*shared_expert_gate$", "re:.*moe[.]gate$"]

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": 4.0}


@dataclasses.dataclass(frozen=True)
class Family:
    """A tiny model: its configuration, and how it is stored."""

    fields: dict[str, Any]
    group_size: int | None = 32
    storage: str = "pack-quantized"
    seed: int = 0


FAMILIES = {
    "mixtral": Family(
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "intermediate_size": 48},
        None,
        "int-quantized",
    ),
    "olmoe": Family({"num_experts": 8, "num_experts_per_tok": 4, "clip_qkv": 1.0, "intermediate_size": 32}),
    "qwen2_moe": Family(
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 2,
        }
    ),
    "qwen3_moe": Family(
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 12,
        }
    ),
    "deepseek_v2": Family(
        LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "rope_parameters": YARN | {"mscale": 0.5, "mscale_all_dim": 0.707, "rope_theta": 10000.0},
        }
    ),
    "deepseek_v3": Family(
        LATENT
        | {
            "q_lora_rank": 32,
            "n_shared_experts": 1,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0},
        }
    ),
    "gpt_oss": Family(
        {
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": YARN | {"truncate": False, "rope_theta": 150000.0},
        }
    ),
    "qwen3": Family(
        {"head_dim": 32, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    ),
    "qwen2": Family({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "llama": Family(
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500000.0,
            },
        }
    ),
}


def random_model(model_type: str, family: Family) -> Any:
    """A float32 model whose values are bfloat16 numbers, norms and biases random too."""
    config = AutoConfig.for_model(model_type, **COMMON | family.fields)
    torch.manual_seed(family.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                value.normal_(0, 0.1)  # stays float32
                continue
            if name.endswith("bias") or name.endswith("sinks"):
                value.normal_(0, 0.3)
            elif value.ndim == 1 and "inv_freq" not in name:
                value.normal_(1, 0.1)
            if "inv_freq" not in name:
                value.copy_(value.bfloat16())
    return model


@dataclasses.dataclass
class Quantized:
    """A quantised parameter, ``[..., out, in]``."""

    codes: torch.Tensor
    scale: torch.Tensor


def quantize(weight: torch.Tensor, group_size: int | None) -> tuple[Quantized, torch.Tensor]:
    """Symmetric, scales by the largest magnitude; also the dequantised weight."""
    *lead, columns = weight.shape
    groups = weight.reshape(*lead, -1, group_size or columns)
    scale = groups.abs().amax(-1) / 7.5
    if group_size:
        scale = scale.bfloat16()
    wide = scale.float()[..., None]
    codes = torch.clamp(torch.round(groups / wide), -8, 7)
    return Quantized(codes.reshape(weight.shape).to(torch.int8), scale), (codes * wide).reshape(weight.shape)


def transposed(name: str, model_type: str) -> bool:
    """Whether an expert parameter is ``[E, in, out]``."""
    return model_type == "gpt_oss" and ".experts." in name


def quantize_model(model: Any, model_type: str, group_size: int | None) -> dict[str, Quantized]:
    """Replaces the weights of linear maps and experts by what their codes stand for."""
    linears = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linears -= {n for n in linears if n == "lm_head.weight" or n.endswith("shared_expert_gate.weight")}
    quantized = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in linears or (value.ndim == 3 and ".experts." in name):
                turned = transposed(name, model_type)
                weight = value.transpose(-1, -2) if turned else value
                quantized[name], dequantized = quantize(weight, group_size)
                value.copy_(dequantized.transpose(-1, -2) if turned else dequantized)
    return quantized


class FakeQuantizeActivations(TorchFunctionMode):
    """Rounds the left side of every product with a quantised weight to INT8, symmetric, per token."""

    def __init__(self, model: Any, names: set[str]) -> None:
        super().__init__()
        self._storages = {p.untyped_storage().data_ptr() for n, p in model.named_parameters() if n in names}
        self.products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = (torch.nn.functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul)
        if func in products and args[1].untyped_storage().data_ptr() in self._storages:
            self.products += 1
            args = (fake_quantize(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    peak = x.abs().amax(-1, keepdim=True)
    codes = torch.clamp(torch.round(x * (127 / peak)), -127, 127)
    return torch.where(peak > 0, codes * (peak / 127), 0.0)


def greedy(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        token = model(ids[None], use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None]])
    return ids[-steps:]


# ---------------------------------------------------------------------------------------------------------
# Names of checkpoints.


def per_expert(name: str, value: Any, split: Callable[[Any, bool], Any]) -> Iterator[tuple[str, Any]]:
    """One expert parameter as modules of their own; ``split`` takes gate or up rows."""
    module, _, parameter = name.rpartition(".")
    parameter, suffix = parameter.removesuffix("_bias"), "bias" if parameter.endswith("_bias") else "weight"
    for expert, part in enumerate(value):
        if parameter == "down_proj":
            yield f"{module}.{expert}.down_proj.{suffix}", part
        else:
            yield f"{module}.{expert}.gate_proj.{suffix}", split(part, True)
            yield f"{module}.{expert}.up_proj.{suffix}", split(part, False)


def checkpoint_name(name: str, model_type: str) -> str:
    if model_type == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
        for new, old in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(new, old)
    return name


def half(model_type: str) -> Callable[[Any, bool], Any]:
    def split(part: Any, first: bool) -> Any:
        if model_type == "gpt_oss":
            return part[0 if first else 1 :: 2]
        middle = len(part) // 2
        return part[:middle] if first else part[middle:]

    return split


def tensors_of(model: Any, model_type: str, family: Family, quantized: dict[str, Quantized]) -> Any:
    """Everything that a checkpoint holds, by name."""
    result: dict[str, torch.Tensor] = {}

    def add_quantized(name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
        if family.storage == "int-quantized":
            result[name] = codes
        else:
            result[f"{name}_packed"] = pack_to_int32(codes, 4)
            result[f"{name}_shape"] = torch.tensor(codes.shape)
        result[f"{name}_scale"] = scale

    split = half(model_type)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        expert = ".experts." in name
        if name in quantized:
            codes, scale = quantized[name].codes, quantized[name].scale
            if expert:
                pairs = zip(per_expert(name, codes, split), per_expert(name, scale, split), strict=True)
                for (own, part), (_, part_scale) in pairs:
                    add_quantized(checkpoint_name(own, model_type), part, part_scale)
            else:
                add_quantized(checkpoint_name(name, model_type), codes, scale)
        elif expert:
            for own, part in per_expert(name, value.bfloat16(), split):
                result[checkpoint_name(own, model_type)] = part
        else:
            exact = name.endswith("e_score_correction_bias")
            result[checkpoint_name(name, model_type)] = value if exact else value.bfloat16()
    return {name: value.contiguous().clone() for name, value in result.items()}


def quantization_config(family: Family) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group" if family.group_size else "channel", "group_size": family.group_size}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": family.storage,
        "ignore": IGNORE,
        "config_groups": {"group_0": group},
    }


def make(model_type: str) -> None:
    family = FAMILIES[model_type]
    model = random_model(model_type, family)
    ids = torch.randint(2, COMMON["vocab_size"], (PROMPT,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        unquantized = model(ids[None], use_cache=False).logits[0]
        quantized = quantize_model(model, model_type, family.group_size)
        weight_only = model(ids[None], use_cache=False).logits[0]
        with FakeQuantizeActivations(model, set(quantized)) as mode:
            logits = model(ids[None], use_cache=False).logits[0]
            products = mode.products
            greedy_ids = greedy(model, ids, GREEDY)
    directory = HERE / f"tiny-{model_type}"
    directory.mkdir(exist_ok=True)
    config = model.config.to_dict() | {"quantization_config": quantization_config(family)}
    for name in ("_name_or_path", "transformers_version", "chunk_size_feed_forward", "id2label", "label2id"):
        config.pop(name, None)
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(tensors_of(model, model_type, family, quantized), directory / "model.safetensors")
    np.savez_compressed(
        directory / "reference.npz",
        prompt_ids=ids.numpy().astype(np.int32),
        logits=logits.numpy(),
        logits_weight_only=weight_only.numpy(),
        greedy_ids=greedy_ids.numpy().astype(np.int32),
    )
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(
        f"{model_type}: {len(quantized)} quantised parameters, {products} products, {size / 1024:.0f} KB; "
        f"activations change logits by {relative(logits, weight_only):.3f}, "
        f"weights by {relative(weight_only, unquantized):.3f}"
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ---------------------------------------------------------------------------------------------------------
# One golden checkpoint again, in double precision.

GOLDEN = HERE.parents[2] / "shared" / "golden" / "deepseek_v3-g32-pack"


def read_golden(directory: Path) -> tuple[Any, set[str]]:
    """A checkpoint with one module per expert as a transformers model; also its quantised parameters."""
    fields = json.loads((directory / "config.json").read_text())
    del fields["quantization_config"]
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    tensors, quantized = load_file(directory / "model.safetensors"), set()

    def weight(name: str, parameter: str) -> torch.Tensor:
        if f"{name}.weight_packed" not in tensors:
            return tensors[f"{name}.weight"]
        quantized.add(parameter)
        shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
        codes = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, shape).float()
        scale = tensors[f"{name}.weight_scale"].float()
        return codes * scale.repeat_interleave(shape[1] // scale.shape[1], 1)

    with torch.no_grad():
        for name, value in model.state_dict().items():
            module, _, last = name.rpartition(".")
            if module.endswith(".experts"):
                parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
                for expert, rows in enumerate(value):
                    rows.copy_(torch.cat([weight(f"{module}.{expert}.{part}", name) for part in parts]))
            else:
                value.copy_(weight(module, name) if last == "weight" else tensors[name])
    return model, quantized


def make_double() -> None:
    """The rules of ``logits`` without rounding errors in between."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:  # transformers' goes through float32
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    modeling_deepseek_v3.DeepseekV3RMSNorm.forward = norm
    model, quantized = read_golden(GOLDEN)
    reference = np.load(GOLDEN / "reference.npz")
    ids = torch.tensor(reference["prompt_ids"]).long()
    model.double()
    with torch.no_grad(), FakeQuantizeActivations(model, quantized):
        logits = model(ids[None], use_cache=False).logits[0].float().numpy()
    np.savez_compressed(HERE / "deepseek_v3-g32-pack-double.npz", logits=logits)
    distance = np.linalg.norm(logits - reference["logits"], axis=1) / np.linalg.norm(
        reference["logits"], axis=1
    )
    print("deepseek_v3-g32-pack in float64, distance by token:", np.round(distance, 6))


# ---------------------------------------------------------------------------------------------------------
# Rotary frequencies of published models.

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "qwen3-yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
    "gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    },
    "deepseek-v2-lite": {
        "rope_type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000,
    },
    "mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 512,
        "rope_theta": 10000.0,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
DYNAMIC_LENGTHS = (100, 8192, 8193, 20000)


def make_ropes() -> None:
    arrays: dict[str, Any] = {"parameters": json.dumps(ROPES), "dynamic_lengths": DYNAMIC_LENGTHS}
    for name, parameters in ROPES.items():
        config = AutoConfig.for_model(
            "llama", head_dim=64, max_position_embeddings=8192, rope_parameters=dict(parameters)
        )
        function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        lengths = DYNAMIC_LENGTHS if name == "dynamic" else (None,)
        found = [function(config, torch.device("cpu"), seq_len=length) for length in lengths]
        arrays[name] = np.stack([frequencies.numpy() for frequencies, _ in found])
        arrays[f"{name}_attention_factor"] = found[0][1]
    np.savez_compressed(HERE / "rope.npz", **arrays)


if __name__ == "__main__":
    makers: dict[str, Callable[[], None]] = {name: functools.partial(make, name) for name in FAMILIES}
    makers |= {"rope": make_ropes, "double": make_double}
    for chosen in sys.argv[1:] or makers:
        makers[chosen]()
