"""Random weights made straight in packed form: a model of 16 GB is there in half a minute."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from jax_w4a8.bench.shapes import LayerShape
from jax_w4a8.buffers import to_device
from jax_w4a8.packing import BLOCK_CHANNELS
from jax_w4a8.quantization import CHANNELWISE, CODES_PER_WORD, QuantizedWords, num_groups
from jax_w4a8.threads import Workers
from jax_w4a8.weights import (
    ExpertParts,
    ExpertWeights,
    LinearWeights,
    fill_expert,
    num_blocks,
    pack_linear,
)


def packed_bytes(out_features: int, in_features: int, group_size: int) -> int:
    """Bytes of one packed matrix: codes, scales, sums and bias."""
    width = LinearWeights(None, None, None, None, out_features, in_features, group_size).group_width
    groups = num_groups(group_size, in_features)
    scale_bytes = 4 if group_size == CHANNELWISE else 2
    per_channel = groups * (width // 2 + scale_bytes) + 8
    return num_blocks(out_features) * BLOCK_CHANNELS * per_channel


def random_words(
    seed: tuple[int, ...], out_features: int, in_features: int, group_size: int
) -> QuantizedWords:
    """Weights ``[N, K]`` of random bits, every one of which is a valid code, about as large as trained ones.

    Scales are bfloat16, channel-wise ones float32. The same seed gives the same weights.
    """
    rng = np.random.Generator(np.random.SFC64(seed))
    count = out_features * -(-in_features // CODES_PER_WORD)
    words = rng.integers(0, 1 << 64, (count + 1) // 2, np.uint64).view(np.int32)[:count]
    scale = rng.random((out_features, num_groups(group_size, in_features)), np.float32)
    scale /= 4.6 * math.sqrt(in_features)
    dtype = np.float32 if group_size == CHANNELWISE else ml_dtypes.bfloat16
    return QuantizedWords(words.reshape(out_features, -1), scale.astype(dtype), in_features, group_size)


def random_linear(out_features: int, in_features: int, group_size: int, seed: int) -> LinearWeights:
    """Random packed weights of one linear map, on the device without a copy."""
    packed: LinearWeights = to_device(
        pack_linear(random_words((seed,), out_features, in_features, group_size))
    )
    return packed


def random_experts(shape: LayerShape, group_size: int, seed: int) -> ExpertWeights:
    """Random packed weights of one layer's experts, on the device without a copy.

    All threads make and pack experts, each one at a time, so that memory holds little more than the result.
    """
    experts = _random_parts(shape, group_size, seed, 0).empty(shape.num_experts)
    with Workers() as workers:
        workers.run(
            functools.partial(_fill, experts, shape, group_size, seed, expert)
            for expert in range(shape.num_experts)
        )
    packed: ExpertWeights = to_device(experts)
    return packed


def _random_parts(shape: LayerShape, group_size: int, seed: int, expert: int) -> ExpertParts:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    parts: Any = (random_words((seed, expert, i), *sizes[i], group_size) for i in range(3))
    return ExpertParts(*parts)


def _fill(experts: ExpertWeights, shape: LayerShape, group_size: int, seed: int, expert: int) -> None:
    fill_expert(experts, expert, _random_parts(shape, group_size, seed, expert), Workers(1))
