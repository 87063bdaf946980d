"""Reads W4A8 checkpoints, in compressed-tensors form or as GGUF files, and writes the former.

A checkpoint is understood on every machine; only the choice of a backend may refuse.
"""

from jax_w4a8.buffers import to_device
from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.experts import ExpertStack, FloatExperts, StoredExperts
from jax_w4a8.checkpoint.layouts import ExpertLayout, claim_experts
from jax_w4a8.checkpoint.modules import MoENames, read_linear, read_moe
from jax_w4a8.checkpoint.reader import Checkpoint
from jax_w4a8.checkpoint.scheme import QuantizationConfig, Scheme, parse_quantization_config
from jax_w4a8.checkpoint.stored import StoredArray, StoredLinear
from jax_w4a8.checkpoint.tensors import TensorFiles, TensorHeader

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertLayout",
    "ExpertStack",
    "FloatExperts",
    "MoENames",
    "QuantizationConfig",
    "Scheme",
    "StoredArray",
    "StoredExperts",
    "StoredLinear",
    "TensorFiles",
    "TensorHeader",
    "claim_experts",
    "parse_quantization_config",
    "read_linear",
    "read_moe",
    "to_device",
]
