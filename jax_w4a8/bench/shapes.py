"""Shapes of published models' layers, and of linear maps given on the command line."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer, as its model's config.json gives them, and how many of them the model has."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_layers: int = 1

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates that one token costs."""
        return self.top_k * 3 * self.hidden_size * self.intermediate_size


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """Sizes of a linear map."""

    out_features: int
    in_features: int

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates that one token costs."""
        return self.out_features * self.in_features


#: By the names that ``--shape`` takes. Fields of config.json: num_experts (num_local_experts,
#: n_routed_experts), num_experts_per_tok, hidden_size, moe_intermediate_size (intermediate_size),
#: num_hidden_layers without those that have no experts.
SHAPES: dict[str, LayerShape] = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768, 48),  # Qwen/Qwen3-30B-A3B
    "olmoe": LayerShape(64, 8, 2048, 1024, 16),  # allenai/OLMoE-1B-7B-0924
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880, 24),  # openai/gpt-oss-20b
    "deepseek-v2-lite": LayerShape(64, 6, 2048, 1408, 26),  # deepseek-ai/DeepSeek-V2-Lite, routed
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336, 32),  # mistralai/Mixtral-8x7B-v0.1
}


def find_shape(name: str) -> LayerShape:
    """The shape called ``name``; ValueError lists the known ones."""
    if name not in SHAPES:
        raise ValueError(f"shape must be one of {list(SHAPES)}, got {name!r}")
    return SHAPES[name]


def parse_linear(text: str) -> LinearShape:
    """The linear map written ``NxK``, output features first; ValueError for anything else."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"linear must be NxK, output x input features such as 1536x2048, got {text!r}")
    return LinearShape(int(match[1]), int(match[2]))
