"""How packed weights come apart: which sizes split into slices of the packed arrays, and along which axes.

Experts are slices of the leading axis. Output channels (*columns* of ``x @ W.T``) are slices of the block
axis, and inputs (*rows*) of the group axis, or, channel-wise, of the bytes inside the only group, which lie
in order of the inputs. Two arrays of a matrix that is split by inputs are not slices of what they were: each
part has a sum of its own for the zero points of its activations, and only the first may add the bias.
:func:`split_inputs` makes them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_w4a8.packing import BLOCK_CHANNELS
from jax_w4a8.quantization import CHANNELWISE, GROUP_MULTIPLE
from jax_w4a8.weights import BLOCK_INPUTS, ExpertWeights, LinearWeights

#: A byte of two codes 0.
_ZERO_CODES = 0x88


def expert_split_reason(num_experts: int, parts: int) -> str | None:
    """Why E experts don't split into ``parts`` equal slices, or None when they do."""
    if num_experts % parts:
        return f"E = {num_experts} experts can't be split over ep_size = {parts}"
    return None


@dataclasses.dataclass(frozen=True)
class Split:
    """One dimension of a matrix in equal parts.

    Attributes:
      name, size: the dimension.
      parts_name, parts: what the number of parts is called, and the number.
    """

    name: str
    size: int
    parts_name: str
    parts: int

    def output_reason(self) -> str | None:
        """Why the parts are no slices of whole blocks of output channels, or None."""
        return self._reason(BLOCK_CHANNELS, f"of {BLOCK_CHANNELS} channels")

    def input_reason(self, group_size: int) -> str | None:
        """Why the parts are no slices of whole groups of inputs, or None."""
        if group_size == CHANNELWISE:
            return self._reason(BLOCK_INPUTS, f"of {BLOCK_INPUTS} inputs")
        return self._reason(group_size, f"of the group size, got g = {group_size}")

    def _reason(self, multiple: int, what: str) -> str | None:
        if self.parts == 1:
            return None
        if self.size % self.parts:
            return f"{self.name} = {self.size} can't be split over {self.parts_name} = {self.parts}"
        part = self.size // self.parts
        if part % multiple:
            return f"{self.name} / {self.parts_name} = {part} must be a multiple {what}"
        return None


def intermediate_split_reason(size: int, group_size: int, parts: int) -> str | None:
    """Why ``parts`` tensor-parallel slices of an intermediate size of ``size`` are impossible, or None."""
    split = Split("intermediate_size", size, "tp_size", parts)
    return split.output_reason() or split.input_reason(group_size)


def part_of(weights: LinearWeights, out_parts: int = 1, in_parts: int = 1) -> LinearWeights:
    """The same arrays, declared to be one of ``out_parts`` x ``in_parts`` equal slices of the matrix."""
    return dataclasses.replace(
        weights,
        out_features=weights.out_features // out_parts,
        in_features=weights.in_features // in_parts,
    )


def split_inputs(weights: LinearWeights, parts: int) -> LinearWeights:
    """Prepares a matrix, or a stack of them, for being sliced by inputs into ``parts``.

    Args:
      weights: packed weights with whole groups in every part (:meth:`Split.input_reason`).
      parts: how many slices there will be.

    Returns:
      The same scales, and the same codes unless parts of a channel-wise matrix have to be filled up to a
      multiple of 32 inputs. ``scaled_sum`` and ``bias`` (numpy) have an axis of ``parts * NB`` blocks where
      they had NB: each part's own sums one after the other, and the bias followed by zeros.
    """
    if parts == 1:
        return weights
    codes = np.asarray(weights.codes)
    if weights.group_size == CHANNELWISE:
        codes = _fill_parts(codes, weights.in_features, parts)
    bias = np.asarray(weights.bias)
    zeros = np.zeros((*bias.shape[:-2], (parts - 1) * bias.shape[-2], BLOCK_CHANNELS), bias.dtype)
    return dataclasses.replace(
        weights,
        codes=codes,
        scaled_sum=_sums_of_parts(codes, np.asarray(weights.scale), parts),
        bias=np.concatenate([bias, zeros], axis=-2),
    )


def split_experts(experts: ExpertWeights, parts: int) -> ExpertWeights:
    """Prepares experts for being sliced along their intermediate size: see :func:`split_inputs`."""
    return dataclasses.replace(experts, w2=split_inputs(experts.w2, parts))


def _fill_parts(codes: np.ndarray[Any, Any], in_features: int, parts: int) -> np.ndarray[Any, Any]:
    """Fills every part of the only group up to whole multiples of 32 inputs, as packing it alone would."""
    size = in_features // parts
    width = -(-size // GROUP_MULTIPLE) * GROUP_MULTIPLE
    if width == size:
        return codes
    whole = codes[..., : BLOCK_INPUTS * in_features].reshape(*codes.shape[:-1], parts, BLOCK_INPUTS * size)
    filled = np.full((*codes.shape[:-1], parts, BLOCK_INPUTS * width), _ZERO_CODES, np.uint8)
    filled[..., : BLOCK_INPUTS * size] = whole
    return filled.reshape(*codes.shape[:-1], -1)


def _sums_of_parts(
    codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], parts: int
) -> np.ndarray[Any, Any]:
    """float32 ``[..., parts * NB, 16]``: what packing each part by itself would give, bit for bit."""
    lead, (blocks, groups, nbytes) = codes.shape[:-3], codes.shape[-3:]
    flat_codes = codes.reshape(-1, blocks, groups, nbytes)
    flat_scale = scale.reshape(-1, blocks, groups, BLOCK_CHANNELS)
    out = np.empty((len(flat_codes), parts, blocks, BLOCK_CHANNELS), np.float32)
    for matrix in range(len(flat_codes)):  # one at a time: the nibbles of all would be as large as the codes
        out[matrix] = _sums_of_matrix(flat_codes[matrix], flat_scale[matrix], parts)
    return out.reshape(*lead, parts * blocks, BLOCK_CHANNELS)


def _sums_of_matrix(
    codes: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], parts: int
) -> np.ndarray[Any, Any]:
    """float32 ``[parts, NB, 16]`` of ``codes [NB, G, bytes]`` and ``scale [NB, G, 16]``."""
    blocks, groups, nbytes = codes.shape
    inner = 1 if groups > 1 else parts  # channel-wise, each part is a run of bytes inside the group
    runs = codes.reshape(blocks, groups * inner, -1, BLOCK_CHANNELS, 4)
    sums = (runs & 15).sum(axis=(2, 4), dtype=np.int32) + (runs >> 4).sum(axis=(2, 4), dtype=np.int32)
    sums -= 8 * (nbytes * 2 // BLOCK_CHANNELS // inner)
    scale = np.repeat(scale, inner, axis=1).astype(np.float32)
    products = (sums.astype(np.float32) * scale).reshape(blocks, parts, -1, BLOCK_CHANNELS)
    total = np.zeros((blocks, parts, BLOCK_CHANNELS), np.float32)
    for group in range(products.shape[2]):
        total += products[:, :, group]
    return total.swapaxes(0, 1)
