"""An output head in INT4: most of what a token of a large vocabulary reads, cut to a quarter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a8.buffers import aligned_empty, to_device
from jax_w4a8.models.layers import Linear, QuantizedOptions
from jax_w4a8.quantization import quantize
from jax_w4a8.weights import LinearWeights, pack_linear

#: Logits suffer from coarse weights first.
GROUP_SIZE = 32
#: Rows that are held in float32 at a time; a multiple of a block's channels.
_ROWS = 8192


def quantize_linear(linear: Linear, options: QuantizedOptions) -> Linear:
    """The linear map with INT4 weights in groups of 32; one that has them already comes back as it is."""
    weight = linear.weight.get_value()
    if isinstance(weight, LinearWeights):
        return linear
    bias = None if linear.bias is None else linear.bias.get_value()
    pieces = [_pack(weight, bias, start) for start in range(0, len(weight), _ROWS)]
    return Linear(to_device(_join(pieces, *weight.shape)), None, options)


def _pack(weight: jax.Array, bias: jax.Array | None, start: int) -> LinearWeights:
    rows = slice(start, start + _ROWS)
    quantized = quantize(weight[rows].astype(jnp.float32), group_size=GROUP_SIZE)
    packed = pack_linear(quantized, None if bias is None else bias[rows])
    host: LinearWeights = jax.tree.map(np.asarray, packed)
    return host


def _join(pieces: list[LinearWeights], out_features: int, in_features: int) -> LinearWeights:
    """One after the other along the block axis."""

    def joined(name: str) -> Any:
        arrays = [getattr(piece, name) for piece in pieces]
        whole = aligned_empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        return np.concatenate(arrays, out=whole)

    return LinearWeights(
        codes=joined("codes"),
        scale=joined("scale"),
        scaled_sum=joined("scaled_sum"),
        bias=joined("bias"),
        out_features=out_features,
        in_features=in_features,
        group_size=GROUP_SIZE,
    )
