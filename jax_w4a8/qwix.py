"""Weights quantised by qwix: INT4 ``QArray`` to this package's codes and scales, value for value.

qwix itself (``pip install 'jax_w4a8[qwix]'``) is not imported here: a ``QArray`` is known by what it holds,
so that arrays which were restored without qwix convert too.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_w4a8.quantization import CHANNELWISE, GROUP_MULTIPLE, QuantizedTensor
from jax_w4a8.weights import ExpertWeights, LinearWeights, pack_experts, pack_linear

_CODE_DTYPES = (jnp.dtype(jnp.int4), jnp.dtype(jnp.int8))


def from_qarray(array: Any, *, in_axis: int = -2, out_axis: int = -1, name: str = "array") -> QuantizedTensor:
    """Codes and scales of a quantised kernel, exactly: ``dequantize`` of both gives the same numbers.

    >>> kernel = jax.random.normal(jax.random.key(0), (4, 64, 96))  # [E, K, N]
    >>> quantized = qwix.quantize(kernel, "int4", channelwise_axes=[0, 2], tiled_axes={1: 32})
    >>> from_qarray(quantized).shape, from_qarray(quantized).group_size
    ((4, 96, 64), 32)

    Args:
      array: a ``qwix.QArray`` with int4 values, symmetric; or what a quantised model holds it in. Scales may
        be per channel, in tiles along any axis, or shared.
      in_axis, out_axis: the axes that are contracted, and kept; all others are leading axes.
      name: what error messages call the array.

    Returns:
      Codes int8 ``[..., N, K]`` and scales ``[..., N, G]``, in the dtype of ``array.scale``.

    Raises:
      TypeError: it holds no int4 (or int8) values.
      ValueError: it has a zero point, values outside [-8, 7], or tiles along the contracted axis that are not
        a multiple of 32.
    """
    array = _unwrap(array)
    for part in ("qvalue", "scale"):
        if not hasattr(array, part):
            raise TypeError(f"{name} must be a qwix.QArray, got {type(array).__name__}")
    if array.qvalue.dtype not in _CODE_DTYPES:
        raise TypeError(f"{name} must hold int4 values, got {array.qvalue.dtype}")
    if getattr(array, "zero_point", None) is not None:
        raise ValueError(f"{name} must be symmetric, got one with a zero point")
    codes = _with_last(array.qvalue, out_axis, in_axis).astype(jnp.int8)
    scale = _with_last(array.scale, out_axis, in_axis)
    scale = _repeat(scale, codes.shape[:-1])
    inputs, groups = codes.shape[-1], scale.shape[-1]
    tile = inputs // groups
    if groups > 1 and tile % GROUP_MULTIPLE:
        raise ValueError(
            f"{name} must have tiles of a multiple of {GROUP_MULTIPLE} along its contracted axis, got {tile}"
        )
    tensor = QuantizedTensor(codes, scale, CHANNELWISE if groups == 1 else tile)
    tensor.check(name)
    return tensor


def linear_from_qarray(
    kernel: Any, bias: Any = None, *, in_axis: int = -2, out_axis: int = -1
) -> LinearWeights:
    """Packed weights of a linear map, or a stack of them (as :func:`jax_w4a8.ragged_dot` takes), from a
    quantised kernel ``[..., K, N]``.

    Raises:
      TypeError, ValueError: as :func:`from_qarray`.
    """
    return pack_linear(from_qarray(kernel, in_axis=in_axis, out_axis=out_axis, name="kernel"), bias)


def experts_from_qarrays(
    gate: Any, up: Any, down: Any, *, in_axis: int = -2, out_axis: int = -1
) -> ExpertWeights:
    """Packed weights of E experts from three quantised kernels.

    Args:
      gate, up: ``[E, H, I]`` (``wi_0`` and ``wi_1`` of T5X and MaxText).
      down: ``[E, I, H]`` (``wo``).
      in_axis, out_axis: as for :func:`from_qarray`.

    Raises:
      TypeError, ValueError: as :func:`from_qarray`; also where ``gate`` and ``up`` differ in their scales.
    """
    axes = {"in_axis": in_axis, "out_axis": out_axis}
    first, second = from_qarray(gate, **axes, name="gate"), from_qarray(up, **axes, name="up")
    if (first.group_size, first.scale.dtype) != (second.group_size, second.scale.dtype):
        raise ValueError(f"gate and up must have one scheme, got {first.key()} and {second.key()}")
    w13 = QuantizedTensor(
        jnp.concatenate([first.codes, second.codes], axis=-2),
        jnp.concatenate([first.scale, second.scale], axis=-2),
        first.group_size,
    )
    return pack_experts(w13, from_qarray(down, **axes, name="down"))


def _unwrap(array: Any) -> Any:
    """The ``QArray`` inside a parameter of a quantised model, which is an ``.array`` of some box, and may be
    inside a Variable.
    """
    while not hasattr(array, "qvalue"):
        if hasattr(array, "get_value"):
            array = array.get_value()
        elif hasattr(array, "array"):
            array = array.array
        else:
            break
    return array


def _with_last(x: Any, out_axis: int, in_axis: int) -> Any:
    return jnp.moveaxis(x, (out_axis, in_axis), (-2, -1))


def _repeat(scale: Any, shape: tuple[int, ...]) -> Any:
    """Scales shared along the leading axes and N, written out."""
    for axis, size in enumerate(shape):
        scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    return scale
