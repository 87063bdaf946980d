"""Reads compressed-tensors W4A8 checkpoints, as Hugging Face tools write them.

A checkpoint is understood on every machine; only the choice of a backend may refuse.
"""

from jax_w4a8.buffers import to_device
from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.experts import ExpertStack, StoredExperts
from jax_w4a8.checkpoint.modules import MoENames, read_linear, read_moe
from jax_w4a8.checkpoint.reader import Checkpoint
from jax_w4a8.checkpoint.scheme import QuantizationConfig, Scheme, parse_quantization_config
from jax_w4a8.checkpoint.stored import StoredArray, StoredLinear
from jax_w4a8.checkpoint.tensors import TensorFiles, TensorHeader

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertStack",
    "MoENames",
    "QuantizationConfig",
    "Scheme",
    "StoredArray",
    "StoredExperts",
    "StoredLinear",
    "TensorFiles",
    "TensorHeader",
    "parse_quantization_config",
    "read_linear",
    "read_moe",
    "to_device",
]
