"""Flax NNX modules whose weights are packed INT4, and the tools to get a model of one's own there.

Pass modules to ``jax.jit`` as arguments. ``nnx.jit`` copies every Variable at every call, packed weights
included, unless it is told ``graph_updates=False``.
"""

from jax_w4a8.nnx.modules import CorrectionBias, PackedWeight, W4A8Linear, W4A8MoE
from jax_w4a8.nnx.quantizing import (
    FloatMoE,
    QuantizationReport,
    ReportEntry,
    W4A8Options,
    quantize_model,
)
from jax_w4a8.nnx.saving import check_packed_metadata, packed_metadata, restore, save

__all__ = [
    "CorrectionBias",
    "FloatMoE",
    "PackedWeight",
    "QuantizationReport",
    "ReportEntry",
    "W4A8Linear",
    "W4A8MoE",
    "W4A8Options",
    "check_packed_metadata",
    "packed_metadata",
    "quantize_model",
    "restore",
    "save",
]
