"""The small model that this package ships."""

from __future__ import annotations

from pathlib import Path

DEFAULT_PROMPT = "And it came to pass in those days, that"


def default_model_path() -> Path:
    """The directory of the shipped model, a checkpoint like any other; ``MODEL_CARD.md`` says what it is."""
    return Path(__file__).parent / "kjv_qwen3_moe"
