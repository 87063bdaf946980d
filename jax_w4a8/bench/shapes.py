"""Layer shapes of published models."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer, as its model's config.json gives them."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates that one token costs."""
        return self.top_k * 3 * self.hidden_size * self.intermediate_size


SHAPES: dict[str, LayerShape] = {
    "qwen3-30b-a3b": LayerShape(128, 8, 2048, 768),
    "olmoe": LayerShape(64, 8, 2048, 1024),
    "gpt-oss-20b": LayerShape(32, 4, 2880, 2880),
    "deepseek-v2-lite": LayerShape(64, 6, 2048, 1408),
    "mixtral-8x7b": LayerShape(8, 2, 4096, 14336),
}


def find_shape(name: str) -> LayerShape:
    """The shape called ``name``; ValueError lists the known ones."""
    if name not in SHAPES:
        raise ValueError(f"shape must be one of {list(SHAPES)}, got {name!r}")
    return SHAPES[name]
