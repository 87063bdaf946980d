"""Whole models from checkpoints: Flax NNX decoders whose experts and linear maps run on W4A8 operations."""

from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.decoder import Decoder
from jax_w4a8.models.default import default_model_path
from jax_w4a8.models.evaluation import Perplexity, perplexity
from jax_w4a8.models.families import FAMILIES, Family
from jax_w4a8.models.generation import GenerationTimes, TokenStream
from jax_w4a8.models.loading import load_model, read_plan
from jax_w4a8.models.packed_cache import PackedCache
from jax_w4a8.models.sampling import Sampling
from jax_w4a8.nnx import PackedWeight

__all__ = [
    "FAMILIES",
    "Decoder",
    "DecoderConfig",
    "Family",
    "GenerationTimes",
    "PackedCache",
    "PackedWeight",
    "Perplexity",
    "Sampling",
    "TokenStream",
    "default_model_path",
    "load_model",
    "perplexity",
    "read_plan",
]
