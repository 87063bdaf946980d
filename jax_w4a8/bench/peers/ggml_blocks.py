"""The block formats of ggml that INT4 weights fit in: Q4_0 exactly, Q4_K with 6-bit scales."""

from __future__ import annotations

import numpy as np

from jax_w4a8.bench.peers.base import group_scales
from jax_w4a8.bench.work import Array
from jax_w4a8.quantization import QuantizedTensor

_GROUP = 32
_SUPER = 256
#: Inputs that a row must have a multiple of.
MULTIPLES = {"q4_0": _GROUP, "q4_K": _SUPER}
#: Bytes of a block of that many inputs.
BLOCK_BYTES = {"q4_0": 18, "q4_K": 144}


def row_bytes(kind: str, inputs: int) -> int:
    """Bytes of one output channel."""
    return inputs // MULTIPLES[kind] * BLOCK_BYTES[kind]


def encode(kind: str, weights: QuantizedTensor) -> Array:
    """uint8 ``[..., N, row bytes]`` of int8 codes ``[..., N, K]`` and their scales."""
    return {"q4_0": _q4_0, "q4_K": _q4_k}[kind](weights)


def _half_bytes(values: Array) -> Array:
    return np.ascontiguousarray(values.astype(np.float16))[..., None].view(np.uint8)


def _q4_0(weights: QuantizedTensor) -> Array:
    """A float16 scale, then 16 bytes: input i in the low nibble of byte i, input 16 + i in the high one."""
    *lead, inputs = weights.codes.shape
    nibbles = (weights.codes + 8).view(np.uint8).reshape(*lead, inputs // _GROUP, _GROUP)
    blocks = np.empty((*lead, inputs // _GROUP, BLOCK_BYTES["q4_0"]), np.uint8)
    blocks[..., :2] = _half_bytes(group_scales(weights, _GROUP))
    half = _GROUP // 2
    np.bitwise_or(nibbles[..., :half], nibbles[..., half:] << 4, out=blocks[..., 2:])
    return blocks.reshape(*lead, -1)


def _q4_k(weights: QuantizedTensor) -> Array:
    """Two float16 factors, eight 6-bit scales and eight 6-bit offsets in 12 bytes, then 128 bytes of nibbles.

    A weight is ``d * scale * q - dmin * offset`` with q in 0..15: the offsets equal the scales here, and
    ``dmin = 8 * d``.
    """
    *lead, inputs = weights.codes.shape
    blocks = np.empty((*lead, inputs // _SUPER, BLOCK_BYTES["q4_K"]), np.uint8)
    scale = group_scales(weights, _GROUP).reshape(*lead, inputs // _SUPER, 8)
    factor = (scale.max(axis=-1) / 63).astype(np.float16).astype(np.float32)
    six = np.clip(np.rint(scale / np.maximum(factor, 1e-8)[..., None]), 0, 63).astype(np.uint8)
    blocks[..., 0:2] = _half_bytes(factor)
    blocks[..., 2:4] = _half_bytes(8 * factor)
    low, high = six[..., :4], six[..., 4:]
    blocks[..., 4:8] = blocks[..., 8:12] = low | (high >> 4 << 6)
    blocks[..., 12:16] = (high & 15) | (high & 15) << 4
    nibbles = (weights.codes + 8).view(np.uint8).reshape(*lead, inputs // _SUPER, 4, 2, _GROUP)
    packed = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    blocks[..., 16:] = packed.reshape(*packed.shape[:-2], -1)
    return blocks.reshape(*lead, -1)
