"""The packed layout as seen from Python: one layout for every instruction set, a pytree of plain arrays.

Output channels are taken in blocks of 16, inputs in runs of 8, so that a block of 16 x 8 codes fills 64
bytes. Byte ``4 * c + i`` of it (channel ``c``, ``i`` in 0..3) holds the code of input ``i`` in its low nibble
and of input ``4 + i`` in its high one, each as code + 8. Channels and inputs that only fill up a block hold
code 0; their scales are 0. ``xla_ffi/layout.h`` is the C++ side of this file.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_w4a8 import packing
from jax_w4a8.buffers import aligned_empty, to_device
from jax_w4a8.packing import BLOCK_CHANNELS, Blocks, Job, Source
from jax_w4a8.quantization import (
    CHANNELWISE,
    GROUP_MULTIPLE,
    SCALE_DTYPES,
    QuantizedTensor,
    QuantizedWords,
    QuantKey,
    check_finite_weights,
    check_float_weights,
    normalize_group_size,
    num_groups,
    quantize,
    weight_key,
)
from jax_w4a8.threads import Workers

#: Changes whenever the meaning of packed bytes does; part of every custom call's name.
LAYOUT_VERSION = 1
BLOCK_INPUTS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearWeights:
    """INT4 weights of one linear map, or of a stack of them (leading axes), packed for the kernels.

    ``NB`` is the number of blocks of 16 output channels, ``G`` the number of groups, ``g`` their size (the
    inputs rounded up to a multiple of 32 when channel-wise).

    Attributes:
      codes: uint8 ``[..., NB, G, 8 * g]``, the layout of this module's docstring.
      scale: bfloat16 or float32 ``[..., NB, G, 16]``.
      scaled_sum: float32 ``[..., NB, 16]``, each channel's sum of scale x code; it carries the zero point of
        asymmetric activations out of the inner loop.
      bias: float32 ``[..., NB, 16]``, zeros where there is none.
      out_features, in_features: sizes before blocks were filled up.
      group_size: inputs per scale, -1 for channel-wise.
    """

    codes: Any
    scale: Any
    scaled_sum: Any
    bias: Any
    out_features: int = dataclasses.field(metadata={"static": True})
    in_features: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})

    @property
    def group_width(self) -> int:
        """Inputs that one row of packed groups holds, filling included."""
        return _group_width(self.group_size, self.in_features)

    @property
    def nbytes(self) -> int:
        """Bytes of all four arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def key(self) -> QuantKey:
        """The scheme's name, as the oracle takes it."""
        return weight_key(self.group_size, self.scale.dtype)

    def check(self, name: str, lead: tuple[int, ...]) -> None:
        """Raises TypeError or ValueError, naming the array at fault, unless the arrays are a packed ``lead``
        stack of matrices of these sizes.
        """
        normalize_group_size(self.group_size, self.in_features)
        channels = (*lead, num_blocks(self.out_features))
        groups = num_groups(self.group_size, self.in_features)
        expected = {
            "codes": ((*channels, groups, BLOCK_INPUTS * self.group_width), (np.dtype(np.uint8),)),
            "scale": ((*channels, groups, BLOCK_CHANNELS), SCALE_DTYPES),
            "scaled_sum": ((*channels, BLOCK_CHANNELS), (np.dtype(np.float32),)),
            "bias": ((*channels, BLOCK_CHANNELS), (np.dtype(np.float32),)),
        }
        for part, (shape, dtypes) in expected.items():
            array = getattr(self, part)
            if tuple(array.shape) != shape:
                raise ValueError(f"{name}.{part} must have shape {shape}, got {tuple(array.shape)}")
            if array.dtype not in dtypes:
                names = " or ".join(str(dtype) for dtype in dtypes)
                raise TypeError(f"{name}.{part} must be {names}, got {array.dtype}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """The weights of E experts, packed for the kernels.

    Attributes:
      w13: gate and up projections, leading axis E. Blocks of 16 gate channels and of the 16 up channels that
        belong to them alternate, so that a kernel's tile holds both sides of the activation and a
        tensor-parallel shard is a slice of the block axis.
      w2: down projections, leading axis E.
    """

    w13: LinearWeights
    w2: LinearWeights

    @property
    def num_experts(self) -> int:
        """E, of this shard."""
        return int(self.w13.codes.shape[-4])

    @property
    def hidden_size(self) -> int:
        """H: width of the tokens."""
        return self.w13.in_features

    @property
    def intermediate_size(self) -> int:
        """I: width between the two projections."""
        return self.w2.in_features

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.w13.nbytes + self.w2.nbytes

    def key(self) -> QuantKey:
        """The scheme's name, as the oracle takes it."""
        return self.w13.key()

    def check(self) -> None:
        """Raises TypeError or ValueError, naming the array at fault, unless both parts hold E matrices."""
        if len(self.w13.codes.shape) != 4:
            raise ValueError(
                f"w13.codes must have shape [E, blocks, groups, bytes], got {tuple(self.w13.codes.shape)}"
            )
        self.w13.check("w13", (self.num_experts,))
        self.w2.check("w2", (self.num_experts,))


def _group_width(group_size: int, in_features: int) -> int:
    if group_size != CHANNELWISE:
        return group_size
    return -(-in_features // GROUP_MULTIPLE) * GROUP_MULTIPLE


def num_blocks(channels: int) -> int:
    """Blocks of 16 output channels, the last one filled up."""
    return -(-channels // BLOCK_CHANNELS)


def _namespace(*arrays: Any) -> ModuleType:
    """numpy for host arrays, so that loading a checkpoint stays on the host; jax.numpy otherwise."""
    return np if all(isinstance(a, np.ndarray | None) for a in arrays) else jnp


def _pad_axis(xp: ModuleType, x: Any, axis: int, size: int) -> Any:
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return xp.pad(x, widths)


def _pack_codes(xp: ModuleType, codes: Any, group_width: int) -> Any:
    """int8 ``[..., N, K]`` (N and K whole blocks and groups) to uint8 ``[..., NB, G, 8 * group_width]``."""
    *lead, n, k = codes.shape
    offset = codes.view(np.uint8) + np.uint8(8)  # wraps to 0..15
    runs = offset.reshape(*lead, n // BLOCK_CHANNELS, BLOCK_CHANNELS, k // BLOCK_INPUTS, 2, 4)
    packed = runs[..., 0, :] | (runs[..., 1, :] << np.uint8(4))
    packed = xp.swapaxes(packed, -2, -3)  # a run's 16 channels become neighbours
    return packed.reshape(*lead, n // BLOCK_CHANNELS, k // group_width, BLOCK_INPUTS * group_width)


def _unpack_codes(xp: ModuleType, packed: Any) -> Any:
    """The inverse of :func:`_pack_codes`."""
    *lead, blocks, groups, nbytes = packed.shape
    runs = packed.reshape(*lead, blocks, groups * nbytes // 64, BLOCK_CHANNELS, 4)
    nibbles = xp.stack([runs & np.uint8(15), runs >> np.uint8(4)], axis=-2)  # [..., run, channel, 2, 4]
    nibbles = xp.swapaxes(nibbles, -3, -4).astype(np.int8) - np.int8(8)
    return nibbles.reshape(*lead, blocks * BLOCK_CHANNELS, groups * nbytes // BLOCK_INPUTS)


def _scaled_sum(xp: ModuleType, codes: Any, scale: Any, group_width: int) -> Any:
    """float32 ``[..., N]``: groups in ascending order, each sum of codes exact."""
    sums = codes.reshape(*scale.shape, group_width).sum(axis=-1, dtype=np.int32)
    sums = sums.astype(np.float32)
    total = xp.zeros(scale.shape[:-1], np.float32)
    for group in range(scale.shape[-1]):
        total = total + sums[..., group] * scale[..., group].astype(np.float32)
    return total


def _pack(weights: QuantizedTensor, bias: Any) -> LinearWeights:
    xp = _namespace(weights.codes, weights.scale, bias)
    *lead, n, k = weights.codes.shape
    group_size = normalize_group_size(weights.group_size, k)
    width = _group_width(group_size, k)
    groups = num_groups(group_size, k)
    channels = num_blocks(n) * BLOCK_CHANNELS
    codes = xp.asarray(weights.codes)
    if codes.dtype != np.int8:
        codes = codes.astype(np.int8)
    codes = _pad_axis(xp, _pad_axis(xp, codes, -1, groups * width), -2, channels)
    scale = xp.asarray(weights.scale)
    if scale.dtype == np.float16:
        scale = scale.astype(np.float32)
    scale = _pad_axis(xp, scale, -2, channels)
    if bias is None:
        bias = xp.zeros((*lead, n), np.float32)
    bias = _pad_axis(xp, xp.asarray(bias).astype(np.float32), -1, channels)
    blocked = (*lead, num_blocks(n), BLOCK_CHANNELS)
    return LinearWeights(
        codes=_pack_codes(xp, codes, width),
        scale=xp.swapaxes(scale.reshape(*blocked, groups), -1, -2),
        scaled_sum=_scaled_sum(xp, codes, scale, width).reshape(blocked),
        bias=bias.reshape(blocked),
        out_features=n,
        in_features=k,
        group_size=group_size,
    )


def _as_array(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else jnp.asarray(x)


def _check_weights(weights: Any, name: str) -> None:
    """Checks dtypes and shapes; values are checked where they are read."""
    if not isinstance(weights, QuantizedTensor | QuantizedWords):
        raise TypeError(
            f"{name} must be a QuantizedTensor (see jax_w4a8.quantize) or QuantizedWords, "
            f"got {type(weights).__name__}"
        )
    weights.check_form(name)


def _one_byte_codes(weights: QuantizedTensor | QuantizedWords) -> QuantizedTensor:
    return weights.unpack() if isinstance(weights, QuantizedWords) else weights


def _check_bias(bias: Any, expected: Sequence[int], name: str) -> Any:
    if bias is None:
        return None
    bias = _as_array(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got {bias.dtype}")
    if tuple(bias.shape) != tuple(expected):
        raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(bias.shape)}")
    return bias


class _Named(NamedTuple):
    """An argument that is packed: its name in messages, its weights, and the precision of their scales."""

    name: str
    source: Source
    group_size: int
    scale_dtype: np.dtype[Any]

    @classmethod
    def quantized(cls, name: str, weights: QuantizedTensor | QuantizedWords) -> _Named:
        dtype = np.dtype(weights.scale.dtype)
        size = normalize_group_size(weights.group_size, weights.shape[-1])
        return cls(name, weights, size, np.dtype(np.float32) if dtype == np.float16 else dtype)

    def empty(self) -> LinearWeights:
        return _empty_linear(self.source.shape, self.group_size, self.scale_dtype)

    def check_values(self) -> None:
        """Raises ValueError if a code is out of range, or a scale or weight isn't finite."""
        if isinstance(self.source, QuantizedTensor | QuantizedWords):
            self.source.check(self.name)
        else:
            check_finite_weights(self.source, self.name)


def _empty_linear(shape: Sequence[int], group_size: int, scale_dtype: np.dtype[Any]) -> LinearWeights:
    """Uninitialised packed weights of ``[..., N, K]``, numpy arrays that JAX takes over without a copy."""
    *lead, n, k = shape
    channels, groups = (*lead, num_blocks(n)), num_groups(group_size, k)
    return LinearWeights(
        codes=aligned_empty((*channels, groups, BLOCK_INPUTS * _group_width(group_size, k)), np.uint8),
        scale=aligned_empty((*channels, groups, BLOCK_CHANNELS), scale_dtype),
        scaled_sum=aligned_empty((*channels, BLOCK_CHANNELS), np.float32),
        bias=aligned_empty((*channels, BLOCK_CHANNELS), np.float32),
        out_features=n,
        in_features=k,
        group_size=group_size,
    )


def _blocks(weights: LinearWeights) -> Blocks:
    return Blocks(weights.codes, weights.scale, weights.scaled_sum, weights.bias)


def _linear_jobs(target: LinearWeights, source: Source, bias: Any) -> Iterator[Job]:
    """Jobs for every matrix of a stack."""
    for index in np.ndindex(target.codes.shape[:-3]):
        one = jax.tree.map(operator.itemgetter(index), source)
        yield Job(one, None if bias is None else bias[index], _blocks(target).at(index), target.in_features)


def _as_numpy(tree: Any) -> Any:
    """Views of jax arrays in host memory."""
    return jax.tree.map(np.asarray, tree)


def _pack_here(
    jobs: Iterator[Job], arguments: Sequence[_Named], target: Any, inputs: Any, workers: Workers | None = None
) -> Any:
    """Runs the jobs that fill ``target``, and returns it where ``inputs`` are: as numpy or as jax arrays."""
    if not packing.run(jobs, workers):
        for argument in arguments:
            argument.check_values()
        raise ValueError(
            f"{' or '.join(argument.name for argument in arguments)} changed while it was packed"
        )
    arrays = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, jax.Array)]
    if not arrays:
        return target
    (device,) = arrays[0].devices()
    return to_device(target, None if device in jnp.zeros(()).devices() else device)


def _pack_linear(argument: _Named, bias: Any) -> LinearWeights:
    target = argument.empty()
    jobs = _linear_jobs(target, *_as_numpy((argument.source, bias)))
    packed: LinearWeights = _pack_here(jobs, [argument], target, (argument.source, bias))
    return packed


def pack_linear(weights: QuantizedTensor | QuantizedWords, bias: Any = None) -> LinearWeights:
    """Packs the weights of a linear map, or of a stack of them, for :func:`jax_w4a8.linear`.

    Args:
      weights: codes ``[..., N, K]`` (or words) with scales ``[..., N, G]``.
      bias: floating point ``[..., N]``, or None.

    Returns:
      :class:`LinearWeights`; numpy arrays when every input is one, else jax arrays.

    Raises:
      TypeError, ValueError: an argument has the wrong type, dtype or shape, a code is outside [-8, 7], or a
        scale isn't finite.
    """
    _check_weights(weights, "weights")
    bias = _check_bias(bias, weights.shape[:-1], "bias")
    if packing.runs_on_host((weights, bias)):
        return _pack_linear(_Named.quantized("weights", weights), bias)
    weights.check("weights")
    return _pack(_one_byte_codes(weights), bias)


def quantize_and_pack_linear(
    w: Any, bias: Any = None, group_size: int | None = 128, *, scale_dtype: DTypeLike | None = None
) -> LinearWeights:
    """``pack_linear(quantize(w, group_size), bias)`` in one pass, with the same bits and no codes in between.

    Args:
      w: float weights ``[..., N, K]``.
      bias: floating point ``[..., N]``, or None.
      group_size, scale_dtype: as for :func:`jax_w4a8.quantize`.

    Returns:
      :class:`LinearWeights`; numpy arrays when every input is one, else jax arrays.

    Raises:
      TypeError, ValueError: as :func:`jax_w4a8.quantize` and :func:`pack_linear`.
    """
    w = _as_array(w)
    size, dtype = check_float_weights(w, group_size, scale_dtype)
    bias = _check_bias(bias, w.shape[:-1], "bias")
    if packing.runs_on_host((w, bias)) and w.shape[-1]:
        return _pack_linear(_Named("w", w, size, dtype), bias)
    return _as_inputs(pack_linear(quantize(w, size, scale_dtype=dtype), bias), (w, bias))


def _as_inputs(packed: Any, inputs: Any) -> Any:
    """``packed`` as numpy arrays if all inputs are."""
    if any(not isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(inputs)):
        return packed
    return jax.tree.map(np.asarray, packed)


def unpack_linear(weights: LinearWeights) -> tuple[QuantizedTensor, jax.Array]:
    """The inverse of :func:`pack_linear`: codes and scales as they went in, the bias as float32 ``[..., N]``.

    Scales that came as float16 come back as float32.
    """
    xp = _namespace(weights.codes, weights.scale, weights.bias)
    lead = weights.codes.shape[:-3]
    codes = _unpack_codes(xp, weights.codes)[..., : weights.out_features, : weights.in_features]
    scale = xp.swapaxes(weights.scale, -1, -2)
    scale = scale.reshape(*lead, -1, scale.shape[-1])[..., : weights.out_features, :]
    bias = weights.bias.reshape(*lead, -1)[..., : weights.out_features]
    return QuantizedTensor(codes, scale, weights.group_size), bias


def _alternate(xp: ModuleType, x: Any, intermediate: int, axis: int, interleaved: bool) -> Any:
    """Brings 2I gate and up channels of ``axis`` into alternating blocks of 16, each filled up with zeros."""
    axis %= x.ndim
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    split = (intermediate, 2) if interleaved else (2, intermediate)
    pairs = x.reshape(*lead, *split, *tail)
    if interleaved:
        pairs = xp.swapaxes(pairs, axis, axis + 1)
    blocks = num_blocks(intermediate)
    pairs = _pad_axis(xp, pairs, axis + 1, blocks * BLOCK_CHANNELS)
    pairs = pairs.reshape(*lead, 2, blocks, BLOCK_CHANNELS, *tail)
    return xp.swapaxes(pairs, axis, axis + 1).reshape(*lead, -1, *tail)


def _separate(xp: ModuleType, x: Any, intermediate: int, axis: int) -> Any:
    """The inverse of :func:`_alternate`, gate channels first."""
    axis %= x.ndim
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    blocks = num_blocks(intermediate)
    pairs = xp.swapaxes(x.reshape(*lead, blocks, 2, BLOCK_CHANNELS, *tail), axis, axis + 1)
    pairs = pairs.reshape(*lead, 2, blocks * BLOCK_CHANNELS, *tail)
    pairs = pairs[(slice(None),) * (axis + 1) + (slice(0, intermediate),)]
    return pairs.reshape(*lead, 2 * intermediate, *tail)


def _check_experts(w13: Any, w2: Any) -> None:
    """Checks that shapes of w13 and w2 fit together."""
    if len(w13.shape) != 3 or len(w2.shape) != 3:
        raise ValueError(f"w13 must be [E, 2I, H] and w2 [E, H, I], got shapes {w13.shape} and {w2.shape}")
    experts, hidden, intermediate = w2.shape
    if w13.shape != (experts, 2 * intermediate, hidden):
        raise ValueError(
            f"w13 must have shape {(experts, 2 * intermediate, hidden)} to fit w2 {w2.shape}, got {w13.shape}"
        )
    if experts == 0:
        raise ValueError("w13 and w2 must hold at least one expert, got E = 0")


def _empty_experts(w13: _Named, w2: _Named) -> ExpertWeights:
    experts, two_i, hidden = w13.source.shape
    filled = 2 * num_blocks(two_i // 2) * BLOCK_CHANNELS
    return ExpertWeights(
        w13=_empty_linear((experts, filled, hidden), w13.group_size, w13.scale_dtype), w2=w2.empty()
    )


def _expert_jobs(
    target: ExpertWeights, inputs: tuple[Source, Source, Any, Any], interleaved: bool
) -> Iterator[Job]:
    """Jobs for every expert: gate channels go to even blocks of w13, up channels to odd ones."""
    w13, w2, w13_bias, w2_bias = inputs
    intermediate = target.intermediate_size
    gate = slice(0, None, 2) if interleaved else slice(0, intermediate)
    up = slice(1, None, 2) if interleaved else slice(intermediate, None)
    for expert in range(target.num_experts):
        blocks = _blocks(target.w13).at(expert)
        for side, rows in enumerate((gate, up)):
            one = jax.tree.map(operator.itemgetter((expert, rows)), w13)
            bias = None if w13_bias is None else w13_bias[expert, rows]
            yield Job(one, bias, blocks.at(slice(side, None, 2)), target.hidden_size)
    yield from _linear_jobs(target.w2, w2, w2_bias)


def _pack_experts(w13: _Named, w2: _Named, w13_bias: Any, w2_bias: Any, interleaved: bool) -> ExpertWeights:
    target = _empty_experts(w13, w2)
    inputs = (w13.source, w2.source, w13_bias, w2_bias)
    jobs = _expert_jobs(target, _as_numpy(inputs), interleaved)
    packed: ExpertWeights = _pack_here(jobs, [w13, w2], target, inputs)
    return packed


def pack_experts(
    w13: QuantizedTensor | QuantizedWords,
    w2: QuantizedTensor | QuantizedWords,
    w13_bias: Any = None,
    w2_bias: Any = None,
    interleaved: bool = False,
) -> ExpertWeights:
    """Packs the weights of E experts for :func:`jax_w4a8.fused_experts` and :func:`jax_w4a8.moe`.

    Args:
      w13: gate and up projections, codes (or words) ``[E, 2I, H]``: all gate channels, then all up channels.
      w2: down projections, codes (or words) ``[E, H, I]``.
      w13_bias: floating point ``[E, 2I]`` in the order of ``w13``, or None.
      w2_bias: floating point ``[E, H]``, or None. Each is multiplied by its router weight.
      interleaved: ``w13`` (and its bias) alternates gate and up channels instead, as gpt-oss stores it.

    Returns:
      :class:`ExpertWeights`; numpy arrays when every input is one, else jax arrays.

    Raises:
      TypeError, ValueError: an argument has the wrong type, dtype or shape, a code is outside [-8, 7], or a
        scale isn't finite.
    """
    _check_weights(w13, "w13")
    _check_weights(w2, "w2")
    _check_experts(w13, w2)
    w13_bias = _check_bias(w13_bias, w13.shape[:-1], "w13_bias")
    w2_bias = _check_bias(w2_bias, w2.shape[:-1], "w2_bias")
    if packing.runs_on_host((w13, w2, w13_bias, w2_bias)):
        arguments = _Named.quantized("w13", w13), _Named.quantized("w2", w2)
        return _pack_experts(*arguments, w13_bias, w2_bias, interleaved)
    w13.check("w13")
    w2.check("w2")
    return _pack_experts_in_python(_one_byte_codes(w13), _one_byte_codes(w2), w13_bias, w2_bias, interleaved)


class ExpertParts(NamedTuple):
    """One expert in numpy arrays: gate and up ``[I, H]``, down ``[H, I]``, and biases."""

    gate: QuantizedTensor | QuantizedWords
    up: QuantizedTensor | QuantizedWords
    down: QuantizedTensor | QuantizedWords
    gate_bias: np.ndarray[Any, Any] | None = None
    up_bias: np.ndarray[Any, Any] | None = None
    down_bias: np.ndarray[Any, Any] | None = None

    def check_form(self) -> None:
        """Raises TypeError or ValueError, naming the part, unless dtypes and shapes fit together."""
        hidden, intermediate = self.down.shape
        for name, shape in (
            ("gate", (intermediate, hidden)),
            ("up", (intermediate, hidden)),
            ("down", (hidden, intermediate)),
        ):
            part = getattr(self, name)
            _check_weights(part, name)
            if part.shape != shape:
                raise ValueError(
                    f"{name} must have shape {shape} to fit down {self.down.shape}, got {part.shape}"
                )
            _check_bias(getattr(self, f"{name}_bias"), shape[:1], f"{name}_bias")

    def empty(self, num_experts: int) -> ExpertWeights:
        """Uninitialised packed weights for so many experts like this one; see :func:`fill_expert`."""
        gate, down = (_Named.quantized("", part) for part in (self.gate, self.down))
        (intermediate, hidden), filled = self.gate.shape, 2 * num_blocks(self.gate.shape[0]) * BLOCK_CHANNELS
        return ExpertWeights(
            w13=_empty_linear((num_experts, filled, hidden), gate.group_size, gate.scale_dtype),
            w2=_empty_linear((num_experts, hidden, intermediate), down.group_size, down.scale_dtype),
        )


def fill_expert(
    experts: ExpertWeights, index: int, parts: ExpertParts, workers: Workers | None = None
) -> None:
    """Packs one expert straight into its place among packed weights of numpy arrays.

    Args:
      experts: as :meth:`ExpertParts.empty` makes them; written to.
      index: the expert's place.
      parts: the expert, of the sizes, group sizes and scale dtypes that ``experts`` has.
      workers: threads to use; None starts some for this call.

    Raises:
      ValueError: a code is outside [-8, 7], or a scale isn't finite.
    """
    named = {name: _Named.quantized(name, getattr(parts, name)) for name in ("gate", "up", "down")}
    if not packing.runs_on_host(parts):
        for part in named.values():
            part.check_values()
        packed = _pack_expert_in_python(parts)
        for whole, one in zip(jax.tree.leaves(experts), jax.tree.leaves(packed), strict=True):
            whole[index] = one[0]
        return
    w13, w2 = _blocks(experts.w13).at(index), _blocks(experts.w2).at(index)
    jobs = [
        Job(parts.gate, parts.gate_bias, w13.at(slice(0, None, 2)), experts.hidden_size),
        Job(parts.up, parts.up_bias, w13.at(slice(1, None, 2)), experts.hidden_size),
        Job(parts.down, parts.down_bias, w2, experts.intermediate_size),
    ]
    _pack_here(iter(jobs), list(named.values()), experts, (), workers)


def _pack_expert_in_python(parts: ExpertParts) -> ExpertWeights:
    gate, up, down = (_one_byte_codes(part) for part in (parts.gate, parts.up, parts.down))
    both = jax.tree.map(lambda *sides: np.concatenate(sides)[None], gate, up)
    bias = None
    if parts.gate_bias is not None or parts.up_bias is not None:
        sides = ((parts.gate_bias, gate), (parts.up_bias, up))
        zeros = [np.zeros(side.shape[0], np.float32) if bias is None else bias for bias, side in sides]
        bias = np.concatenate(zeros)[None]
    down_bias = None if parts.down_bias is None else parts.down_bias[None]
    return _pack_experts_in_python(both, jax.tree.map(lambda leaf: leaf[None], down), bias, down_bias, False)


def _pack_experts_in_python(
    w13: QuantizedTensor, w2: QuantizedTensor, w13_bias: Any, w2_bias: Any, interleaved: bool
) -> ExpertWeights:
    """In numpy or jax.numpy: under ``jit``, off the CPU, and without the extension."""
    intermediate = w2.shape[-1]
    xp = _namespace(w13.codes, w13.scale, w13_bias)
    blocked = QuantizedTensor(
        _alternate(xp, w13.codes, intermediate, -2, interleaved),
        _alternate(xp, w13.scale, intermediate, -2, interleaved),
        w13.group_size,
    )
    if w13_bias is not None:
        w13_bias = _alternate(xp, w13_bias, intermediate, -1, interleaved)
    return ExpertWeights(w13=_pack(blocked, w13_bias), w2=_pack(w2, w2_bias))


def quantize_and_pack_experts(
    w13: Any,
    w2: Any,
    w13_bias: Any = None,
    w2_bias: Any = None,
    interleaved: bool = False,
    group_size: int | None = 128,
    *,
    scale_dtype: DTypeLike | None = None,
) -> ExpertWeights:
    """:func:`pack_experts` of quantised float weights in one pass: the same bits, no codes in between.

    Args:
      w13: gate and up projections, float ``[E, 2I, H]``.
      w2: down projections, float ``[E, H, I]``.
      w13_bias, w2_bias, interleaved: as for :func:`pack_experts`.
      group_size, scale_dtype: as for :func:`jax_w4a8.quantize`.

    Returns:
      :class:`ExpertWeights`; numpy arrays when every input is one, else jax arrays.

    Raises:
      TypeError, ValueError: as :func:`jax_w4a8.quantize` and :func:`pack_experts`.
    """
    w13, w2 = _as_array(w13), _as_array(w2)
    (size13, dtype13), (size2, dtype2) = (
        check_float_weights(w, group_size, scale_dtype, name) for w, name in ((w13, "w13"), (w2, "w2"))
    )
    _check_experts(w13, w2)
    w13_bias = _check_bias(w13_bias, w13.shape[:-1], "w13_bias")
    w2_bias = _check_bias(w2_bias, w2.shape[:-1], "w2_bias")
    inputs = (w13, w2, w13_bias, w2_bias)
    if packing.runs_on_host(inputs):
        arguments = _Named("w13", w13, size13, dtype13), _Named("w2", w2, size2, dtype2)
        return _pack_experts(*arguments, w13_bias, w2_bias, interleaved)
    check_finite_weights(w13, "w13")
    check_finite_weights(w2, "w2")
    packed = pack_experts(
        quantize(w13, size13, scale_dtype=dtype13),
        quantize(w2, size2, scale_dtype=dtype2),
        w13_bias,
        w2_bias,
        interleaved,
    )
    return _as_inputs(packed, inputs)


def unpack_experts(
    experts: ExpertWeights,
) -> tuple[QuantizedTensor, QuantizedTensor, jax.Array, jax.Array]:
    """The inverse of :func:`pack_experts`: ``w13`` (gate first), ``w2``, ``w13_bias``, ``w2_bias``."""
    xp = _namespace(experts.w13.codes, experts.w13.scale, experts.w13.bias)
    blocked, bias = unpack_linear(experts.w13)
    size = experts.intermediate_size
    w13 = QuantizedTensor(
        _separate(xp, blocked.codes, size, -2),
        _separate(xp, blocked.scale, size, -2),
        blocked.group_size,
    )
    w2, w2_bias = unpack_linear(experts.w2)
    return w13, w2, _separate(xp, bias, size, -1), w2_bias
