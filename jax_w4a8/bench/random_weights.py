"""Random weights made straight in packed form, as fast as memory allows."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from jax_w4a8.buffers import aligned_empty, to_device
from jax_w4a8.quantization import CHANNELWISE, num_groups
from jax_w4a8.weights import BLOCK_CHANNELS, BLOCK_INPUTS, ExpertWeights, LinearWeights, num_blocks

#: Root mean square of a random code, all sixteen alike.
_CODE_RMS = 4.6
_ZERO_PAIR = 0x88
_RUN_BYTES = BLOCK_CHANNELS * BLOCK_INPUTS // 2
#: Sum of the two codes of a byte.
_PAIR_SUMS = np.array([(pair & 15) + (pair >> 4) - 16 for pair in range(256)], np.int8)


def random_linear(
    rng: np.random.Generator,
    lead: tuple[int, ...],
    out_features: int,
    in_features: int,
    group_size: int,
) -> LinearWeights:
    """Weights of about unit gain, numpy arrays with leading axes ``lead``.

    The matrices of a stack hold the same random bytes in different places, with scales of their own: they
    differ byte for byte, and a whole model takes seconds. Channel-wise scales are float32, those of groups
    bfloat16, as checkpoints have them.
    """
    groups = num_groups(group_size, in_features)
    width = LinearWeights(None, None, None, None, out_features, in_features, group_size).group_width
    channels = (*lead, num_blocks(out_features))
    codes = aligned_empty((*channels, groups, BLOCK_INPUTS * width), np.uint8)
    scale_dtype = np.float32 if group_size == CHANNELWISE else ml_dtypes.bfloat16
    scale = aligned_empty((*channels, groups, BLOCK_CHANNELS), scale_dtype)
    scaled_sum = aligned_empty((*channels, BLOCK_CHANNELS), np.float32)
    bias = aligned_empty((*channels, BLOCK_CHANNELS), np.float32)
    bias[...] = 0

    base = np.frombuffer(rng.bytes(math.prod(codes.shape[len(lead) :])), np.uint8)
    base = base.reshape(channels[-1], groups, -1, _RUN_BYTES).copy()
    _blank_filling(base, out_features, in_features)
    sums = _group_sums(base)
    unit = 1 / (_CODE_RMS * math.sqrt(in_features))
    # Whole blocks and runs may change places wherever none is there only for filling.
    blocks = base.shape[0] if out_features % BLOCK_CHANNELS == 0 else 1
    runs = base.shape[2] if in_features == groups * width else 1
    for number, matrix in enumerate(np.ndindex(*lead)):
        shift = number // runs % blocks
        _rolled_into(codes[matrix].reshape(base.shape), base, shift, number % runs)
        scale[matrix] = rng.uniform(0.75 * unit, 1.25 * unit, scale[matrix].shape).astype(scale_dtype)
        products = np.roll(sums, shift, axis=0) * scale[matrix].astype(np.float32)
        scaled_sum[matrix] = products.sum(axis=1)
    return LinearWeights(codes, scale, scaled_sum, bias, out_features, in_features, group_size)


def random_experts(
    rng: np.random.Generator, num_experts: int, hidden_size: int, intermediate_size: int, group_size: int
) -> ExpertWeights:
    """Weights of one MoE layer, numpy arrays.

    Raises:
      ValueError: ``intermediate_size`` isn't a multiple of 16, as those of published models are.
    """
    if intermediate_size % BLOCK_CHANNELS:
        raise ValueError(f"intermediate_size must be a multiple of {BLOCK_CHANNELS}, got {intermediate_size}")
    return ExpertWeights(
        w13=random_linear(rng, (num_experts,), 2 * intermediate_size, hidden_size, group_size),
        w2=random_linear(rng, (num_experts,), hidden_size, intermediate_size, group_size),
    )


def packed_bytes(out_features: int, in_features: int, group_size: int) -> int:
    """Bytes of one packed matrix: codes, scales, sums and bias."""
    width = LinearWeights(None, None, None, None, out_features, in_features, group_size).group_width
    groups = num_groups(group_size, in_features)
    scale_bytes = 4 if group_size == CHANNELWISE else 2
    per_channel = groups * (width // 2 + scale_bytes) + 8
    return num_blocks(out_features) * BLOCK_CHANNELS * per_channel


def on_device(weights: Any) -> Any:
    """Numpy weights as jax arrays, taken over without a copy."""
    return to_device(weights)


def _blank_filling(base: Any, out_features: int, in_features: int) -> None:
    """Gives channels and inputs that only fill up blocks the code 0, as packing does."""
    blocks, groups, runs, _ = base.shape
    cells = base.reshape(blocks, groups * runs, BLOCK_CHANNELS, 4)
    cells[:, -(-in_features // BLOCK_INPUTS) :] = _ZERO_PAIR
    first = in_features % BLOCK_INPUTS
    for offset in range(first, BLOCK_INPUTS if first else 0):
        cell = cells[:, in_features // BLOCK_INPUTS, :, offset % 4]
        cell[...] = (cell & 0x0F) | 0x80 if offset >= 4 else (cell & 0xF0) | 0x08
    if out_features % BLOCK_CHANNELS:
        cells[-1, :, out_features % BLOCK_CHANNELS :] = _ZERO_PAIR


def _group_sums(base: Any) -> Any:
    """int32 ``[blocks, groups, 16]``: sums of codes."""
    pairs = _PAIR_SUMS[base].reshape(*base.shape[:3], BLOCK_CHANNELS, 4)
    return pairs.sum(axis=(2, 4), dtype=np.int32)


def _rolled_into(target: Any, base: Any, blocks: int, runs: int) -> None:
    """``np.roll(base, (blocks, runs), axis=(0, 2))`` without a temporary."""
    for to_blocks, from_blocks in _halves(blocks):
        for to_runs, from_runs in _halves(runs):
            target[to_blocks, :, to_runs] = base[from_blocks, :, from_runs]


def _halves(shift: int) -> list[tuple[slice, slice]]:
    if shift == 0:
        return [(slice(None), slice(None))]
    return [(slice(shift, None), slice(None, -shift)), (slice(None, shift), slice(-shift, None))]
