"""Whole models from checkpoints: Flax NNX decoders whose experts and linear maps run on W4A8 operations."""

from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.decoder import Decoder
from jax_w4a8.models.default import default_model_path
from jax_w4a8.models.families import FAMILIES, Family
from jax_w4a8.models.generation import GenerationTimes, GreedyStream
from jax_w4a8.models.loading import load_model, read_plan
from jax_w4a8.nnx import PackedWeight

__all__ = [
    "FAMILIES",
    "Decoder",
    "DecoderConfig",
    "Family",
    "GenerationTimes",
    "GreedyStream",
    "PackedWeight",
    "default_model_path",
    "load_model",
    "read_plan",
]
