"""INT4 weights as codes and scales: what a scheme is called, and how floats become codes.

A weight is ``code * scale``: codes are integers of [-8, 7]; one scale serves a group of ``group_size``
consecutive inputs of one output channel, or the whole channel (``group_size=-1``). Weights are stored
``[..., out, in]``, as checkpoints store them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

CODE_MIN, CODE_MAX = -8, 7
#: Inputs that every kernel consumes at a time; a group is a whole number of these.
GROUP_MULTIPLE = 32
#: Inputs that a scale may serve: the most, as a power of two, whose sum of products of codes fits 32 bits in
#: every form that kernels use. The largest product is 15 x 128, a stored code (code + 8) times an activation.
MOST_GROUP_INPUTS = 1 << 20
CHANNELWISE = -1
#: Precisions in which packed weights keep their scales; float16 is widened to float32.
SCALE_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


class GroupShape(NamedTuple):
    """Extent of the weights that share a scale: ``(1, g)`` for groups, ``(-1, 1)`` for channel-wise."""

    row: int
    col: int

    @classmethod
    def from_group_size(cls, group_size: int) -> GroupShape:
        """``-1`` gives the channel-wise shape, a positive size the group-wise one."""
        return cls(-1, 1) if group_size == CHANNELWISE else cls(1, group_size)

    @property
    def group_size(self) -> int:
        """The inverse of :meth:`from_group_size`; a shape that is neither raises ValueError."""
        if self == (-1, 1):
            return CHANNELWISE
        if self.row == 1 and self.col > 0:
            return self.col
        raise ValueError(
            f"group_shape must be (-1, 1) for channel-wise or (1, g) for groups, got {tuple(self)}"
        )


@dataclasses.dataclass(frozen=True)
class QuantKey:
    """Names a quantisation scheme of weights or activations, so that backends can be asked about it."""

    dtype: Any
    scale_dtype: Any
    group_shape: GroupShape
    symmetric: bool = True

    def __str__(self) -> str:
        shape = self.group_shape
        if shape == (-1, 1):
            grouping = "channel-wise"
        elif shape == (1, -1):
            grouping = "per token"
        else:
            grouping = f"groups of {shape.col}"
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"{_dtype_name(self.dtype)} {grouping}, {_dtype_name(self.scale_dtype)} scales, {symmetry}"


def _dtype_name(dtype: Any) -> str:
    return str(jnp.dtype(dtype).name)


def normalize_group_size(group_size: int | None, in_features: int) -> int:
    """Returns ``-1`` for every spelling of channel-wise (-1, None, ``in_features``), else the group size.

    Raises:
      ValueError: the size is neither one of those nor a positive multiple of 32, or more than 2^20 inputs
        would share a scale.
    """
    if group_size is None or group_size in (CHANNELWISE, in_features):
        size, inputs = CHANNELWISE, in_features
    elif group_size <= 0 or group_size % GROUP_MULTIPLE:
        raise ValueError(
            f"group_size must be -1, None or {in_features} (channel-wise) or a positive multiple of "
            f"{GROUP_MULTIPLE}, got {group_size}"
        )
    else:
        size = inputs = int(group_size)
    if inputs > MOST_GROUP_INPUTS:
        raise ValueError(
            f"group_size must give at most {MOST_GROUP_INPUTS} inputs to a scale, whose sums are exact in 32 "
            f"bits, got {group_size} for {in_features} inputs"
        )
    return size


def num_groups(group_size: int, in_features: int) -> int:
    """Scales per output channel; a short last group counts."""
    return 1 if group_size == CHANNELWISE else math.ceil(in_features / group_size)


def _infer_group_size(in_features: int, groups: int) -> int:
    if groups == 1:
        return CHANNELWISE
    if groups > 1 and in_features % groups == 0 and (in_features // groups) % GROUP_MULTIPLE == 0:
        return in_features // groups
    fits = [
        g for g in range(GROUP_MULTIPLE, in_features, GROUP_MULTIPLE) if num_groups(g, in_features) == groups
    ]
    if len(fits) == 1:
        return fits[0]
    found = f"several group sizes fit ({fits})" if fits else f"no multiple of {GROUP_MULTIPLE} fits"
    raise ValueError(
        f"scale has {groups} groups for {in_features} inputs: {found}; give group_size explicitly"
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """INT4 codes with their scales, not yet packed for a kernel.

    Attributes:
      codes: int8 ``[..., N, K]`` (or ``jnp.int4``), values of [-8, 7].
      scale: float32, bfloat16 or float16 ``[..., N, ceil(K / group_size)]``; negative values are legal.
      group_size: inputs per scale, -1 for channel-wise. Inferred from the shapes where that is unambiguous.
    """

    codes: Any
    scale: Any
    group_size: int = dataclasses.field(default=None, metadata={"static": True})  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.group_size is None:
            for name, array in (("codes", self.codes), ("scale", self.scale)):
                if np.ndim(array) < 2:
                    raise ValueError(f"{name} must have at least two axes, got shape {np.shape(array)}")
            group_size = _infer_group_size(self.codes.shape[-1], self.scale.shape[-1])
            object.__setattr__(self, "group_size", group_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: ``[..., N, K]``."""
        return tuple(self.codes.shape)

    def dequantize(self) -> jax.Array:
        """float32 weights ``[..., N, K]``."""
        return dequantize(self)

    def key(self) -> QuantKey:
        """The scheme's name, as the oracle takes it."""
        return weight_key(self.group_size, self.scale.dtype)

    def check(self, name: str = "weights") -> None:
        """Raises TypeError or ValueError, naming the argument ``name``, unless everything fits together."""
        self.check_form(name)
        _check_values(self.codes, self.scale, name)

    def check_form(self, name: str = "weights") -> None:
        """As :meth:`check`, of dtypes and shapes alone."""
        codes = self.codes
        if codes.dtype not in (jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)):
            raise TypeError(f"{name}.codes must be int8 or int4, got {codes.dtype}")
        _check_scale_dtype(self.scale, name)
        if codes.ndim < 2:
            raise ValueError(f"{name}.codes must be [..., N, K], got shape {tuple(codes.shape)}")
        if codes.shape[-1] == 0:
            raise ValueError(f"{name}.codes must have at least one input, got shape {tuple(codes.shape)}")
        _check_scale_shape(self.scale, self.shape, self.group_size, name)


#: Codes that a word of :class:`QuantizedWords` holds.
CODES_PER_WORD = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWords:
    """INT4 codes with their scales as compressed-tensors stores them: eight codes to a 32-bit word.

    Attributes:
      words: int32 ``[..., N, ceil(K / 8)]``; each code plus 8 in four bits, the first in the lowest ones.
      scale: float32, bfloat16 or float16 ``[..., N, ceil(K / group_size)]``; negative values are legal.
      in_features: K; what a last word holds behind it has no meaning.
      group_size: inputs per scale, -1 for channel-wise.
    """

    words: Any
    scale: Any
    in_features: int = dataclasses.field(metadata={"static": True})
    group_size: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights: ``[..., N, K]``."""
        return (*self.words.shape[:-1], self.in_features)

    def unpack(self) -> QuantizedTensor:
        """The same weights, one code to a byte; numpy arrays if these are, else jax arrays."""
        return QuantizedTensor(unpack_words(self.words, self.in_features), self.scale, self.group_size)

    def check(self, name: str = "weights") -> None:
        """Raises TypeError or ValueError, naming the argument ``name``, unless everything fits together."""
        self.check_form(name)
        _check_scale_values(self.scale, name)

    def check_form(self, name: str = "weights") -> None:
        """As :meth:`check`, of dtypes and shapes alone."""
        words = self.words
        if words.dtype != jnp.dtype(jnp.int32):
            raise TypeError(f"{name}.words must be int32, got {words.dtype}")
        _check_scale_dtype(self.scale, name)
        if words.ndim < 2:
            raise ValueError(f"{name}.words must be [..., N, ceil(K / 8)], got shape {tuple(words.shape)}")
        if self.in_features < 1:
            raise ValueError(f"{name}.in_features must be at least 1, got {self.in_features}")
        if words.shape[-1] != -(-self.in_features // CODES_PER_WORD):
            raise ValueError(
                f"{name}.words must have {-(-self.in_features // CODES_PER_WORD)} words a row for "
                f"{self.in_features} inputs, got shape {tuple(words.shape)}"
            )
        _check_scale_shape(self.scale, self.shape, self.group_size, name)


def unpack_words(words: Any, in_features: int) -> Any:
    """int8 codes ``[..., N, K]`` of int32 words ``[..., N, ceil(K / 8)]``: ``pack_to_int32`` undone.

    Args:
      words: a numpy or jax array; the codes are one of the same kind.
      in_features: K.
    """
    if isinstance(words, np.ndarray):
        pairs = words.astype("<i4", order="C", copy=False).view(np.uint8)
        codes = np.empty((*pairs.shape, 2), np.int8)
        np.bitwise_and(pairs, 15, out=codes[..., 0].view(np.uint8))
        np.right_shift(pairs, 4, out=codes[..., 1].view(np.uint8))
        codes -= 8
    else:
        shifts = 4 * jnp.arange(CODES_PER_WORD, dtype=jnp.int32)
        codes = ((words[..., None] >> shifts) & 15).astype(jnp.int8) - jnp.int8(8)
    return codes.reshape(*words.shape[:-1], -1)[..., :in_features]


def _check_scale_dtype(scale: Any, name: str) -> None:
    if scale.dtype not in (*SCALE_DTYPES, jnp.dtype(jnp.float16)):
        raise TypeError(f"{name}.scale must be float32, bfloat16 or float16, got {scale.dtype}")


def _check_scale_shape(scale: Any, shape: tuple[int, ...], group_size: int, name: str) -> None:
    size = normalize_group_size(group_size, shape[-1])
    expected = (*shape[:-1], num_groups(size, shape[-1]))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{name}.scale must have shape {expected} for codes {shape} and "
            f"group_size {group_size}, got {tuple(scale.shape)}"
        )


def _check_scale_values(scale: Any, name: str) -> None:
    if not isinstance(scale, jax.core.Tracer) and not bool(np.isfinite(np.asarray(scale, np.float32)).all()):
        raise ValueError(f"{name}.scale holds NaN or infinity")


def _check_values(codes: Any, scale: Any, name: str) -> None:
    if isinstance(codes, jax.core.Tracer) or isinstance(scale, jax.core.Tracer) or not codes.size:
        return
    # int4 can't leave the range; for int8 two reductions find the offender. They are numpy's, without a copy
    # on CPU: jax's would be traced inside a jitted function that closes over the weights.
    low, high = 0, 0
    if codes.dtype != jnp.int4:
        host = np.asarray(codes)
        low, high = int(host.min()), int(host.max())
    if low < CODE_MIN or high > CODE_MAX:
        worst = low if low < CODE_MIN else high
        raise ValueError(f"{name}.codes must lie in [{CODE_MIN}, {CODE_MAX}], found the value {worst}")
    _check_scale_values(scale, name)


def weight_key(group_size: int, scale_dtype: DTypeLike) -> QuantKey:
    """The weights' part of a W4A8 scheme: INT4, symmetric, groups of ``group_size`` (-1: channel-wise)."""
    return QuantKey(jnp.dtype(jnp.int4), jnp.dtype(scale_dtype), GroupShape.from_group_size(group_size))


def _group_view(x: jax.Array, group_size: int, groups: int) -> jax.Array:
    """``[..., K]`` as ``[..., groups, K']``, the short last group filled up with zeros."""
    width = x.shape[-1] if group_size == CHANNELWISE else group_size
    padding = groups * width - x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return padded.reshape(*x.shape[:-1], groups, width)


def _divide(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x / y``, correctly rounded: the largest magnitude lies just between two codes.

    The barrier keeps XLA from multiplying by a reciprocal of what it sees was broadcast.
    """
    return x / lax.optimization_barrier(y)


def check_float_weights(
    w: Any, group_size: int | None, scale_dtype: DTypeLike | None, name: str = "w"
) -> tuple[int, np.dtype[Any]]:
    """The group size (-1 channel-wise) and the scales' dtype for quantising float weights ``w``.

    Raises:
      TypeError, ValueError: as :func:`quantize`, but for values.
    """
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating point array, got {w.dtype}")
    if w.ndim < 2:
        raise ValueError(f"{name} must be [..., N, K], got shape {w.shape}")
    size = normalize_group_size(group_size, w.shape[-1])
    if scale_dtype is None:
        scale_dtype = jnp.float32 if size == CHANNELWISE else jnp.bfloat16
    if jnp.dtype(scale_dtype) not in SCALE_DTYPES:
        raise TypeError(f"scale_dtype must be float32 or bfloat16, got {jnp.dtype(scale_dtype)}")
    return size, jnp.dtype(scale_dtype)


def check_finite_weights(w: Any, name: str = "w") -> None:
    """Raises ValueError, naming the argument ``name``, if an array (no tracer) holds NaN or infinity."""
    if not isinstance(w, jax.core.Tracer) and not bool(jnp.isfinite(w).all()):
        raise ValueError(f"{name} holds NaN or infinity")


def quantize(
    w: ArrayLike, group_size: int | None = 128, *, scale_dtype: DTypeLike | None = None
) -> QuantizedTensor:
    """Quantises float weights to INT4 by the largest magnitude of each group.

    The rule is the one of the compressed-tensors writer (``calculate_qparams``, symmetric, 4 bits): scale =
    largest magnitude / 7.5, code = clamp(round(weight / scale), -8, 7), halves to even.

    Args:
      w: float weights ``[..., N, K]``.
      group_size: inputs per scale, a multiple of 32; -1, None or K for one scale per output channel.
      scale_dtype: float32 or bfloat16. None takes bfloat16 for groups and float32 channel-wise. Codes are
        computed from the rounded scales.

    Returns:
      A :class:`QuantizedTensor` of int8 codes ``[..., N, K]`` and scales ``[..., N, ceil(K / group_size)]``.

    Raises:
      TypeError: ``w`` is not floating point, or ``scale_dtype`` is not one of those named.
      ValueError: ``w`` has fewer than two axes or holds NaN or infinity, or the group size is not usable.
    """
    array = jnp.asarray(w)
    size, scale_dtype = check_float_weights(array, group_size, scale_dtype)
    check_finite_weights(array)
    k = array.shape[-1]
    groups = _group_view(array.astype(jnp.float32), size, num_groups(size, k))
    largest = jnp.abs(groups).max(axis=-1)
    scale = _divide(largest, jnp.full_like(largest, 7.5)).astype(scale_dtype)
    divisor = jnp.broadcast_to(scale.astype(jnp.float32)[..., None], groups.shape)
    ratio = _divide(groups, jnp.where(divisor > 0, divisor, 1))
    codes = jnp.clip(jnp.round(jnp.where(divisor > 0, ratio, 0)), CODE_MIN, CODE_MAX).astype(jnp.int8)
    codes = codes.reshape(*array.shape[:-1], math.prod(groups.shape[-2:]))[..., :k]
    return QuantizedTensor(codes, scale, size)


def dequantize(weights: QuantizedTensor) -> jax.Array:
    """float32 weights ``[..., N, K]``: each code times its group's scale.

    Raises:
      TypeError, ValueError: as :meth:`QuantizedTensor.check`.
    """
    weights.check()
    codes = jnp.asarray(weights.codes).astype(jnp.float32)
    scale = jnp.asarray(weights.scale).astype(jnp.float32)
    groups = _group_view(codes, weights.group_size, scale.shape[-1]) * scale[..., None]
    return groups.reshape(*codes.shape[:-1], math.prod(groups.shape[-2:]))[..., : codes.shape[-1]]
