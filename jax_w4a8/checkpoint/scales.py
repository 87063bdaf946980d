"""How weights become codes: a scale per group by largest magnitude, or by least squared error."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_w4a8.quantization import CODE_MAX, CODE_MIN, num_groups, quantize

#: ``absmax``: the compressed-tensors writer's rule. ``mse``: the scale of least squared error among
#: candidates.
SCALE_METHODS = ("absmax", "mse")

#: Candidates put a group's largest magnitude on so many steps of the scale: from above the last code, which
#: clips nothing, to 2.5 times as far, which clips the tails of a long row. Both signs are tried, since the
#: codes reach one step farther down than up.
_STEPS = tuple(np.geomspace(7.0, 20.0, 20).tolist())


@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """Some rows of a quantised matrix, numpy arrays.

    Attributes:
      codes: int8 ``[N, K]``.
      scale: ``[N, G]``.
      squared_error, squared_norm: float64 sums over these rows, of ``(weight - code * scale)**2`` and
        ``weight**2``.
      finite: False if a weight is NaN or infinite; nothing else means anything then.
    """

    codes: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]
    squared_error: float
    squared_norm: float
    finite: bool


def quantize_rows(
    weights: np.ndarray[Any, Any], group_size: int, scale_dtype: Any, method: str
) -> QuantizedRows:
    """Quantises rows of a weight matrix; each is on its own, so that pieces of a matrix may come one by one.

    Args:
      weights: floating point ``[N, K]``.
      group_size: inputs per scale, -1 for the whole row.
      scale_dtype: bfloat16 or float32. Codes are computed from the rounded scales.
      method: ``absmax`` or ``mse``; the latter's squared error is never larger, group by group.
    """
    codes, scale, error, norm = map(
        np.asarray, _quantize(weights, group_size, jnp.dtype(scale_dtype), method)
    )
    total = float(norm.sum(dtype=np.float64))
    finite = bool(np.isfinite(norm).all() and np.isfinite(scale.astype(np.float32)).all())
    return QuantizedRows(codes, scale, float(error.sum(dtype=np.float64)), total, finite)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(
    weights: jax.Array, group_size: int, scale_dtype: Any, method: str
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Codes, scales, and each row's squared error and squared norm."""
    w = weights.astype(jnp.float32)
    rows, columns = w.shape
    groups = num_groups(group_size, columns)
    width = columns if group_size < 0 else group_size
    grouped = jnp.pad(w, ((0, 0), (0, groups * width - columns))).reshape(rows, groups, width)
    scale = quantize(w, group_size, scale_dtype=scale_dtype).scale
    if method == "mse":
        scale = _search(grouped, scale)
    codes = _round(grouped, scale.astype(jnp.float32))
    error = _squared_error(grouped, scale.astype(jnp.float32))
    flat = codes.astype(jnp.int8).reshape(rows, -1)[:, :columns]
    return flat, scale, error.sum(axis=-1), (w * w).sum(axis=-1)


def _round(grouped: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes as float32 ``[N, G, g]``; of a scale of 0 they are 0."""
    # The barrier keeps XLA from multiplying by a reciprocal, which rounds otherwise.
    divisor = lax.optimization_barrier(jnp.broadcast_to(scale[..., None], grouped.shape))
    ratio = jnp.where(divisor != 0, grouped / jnp.where(divisor != 0, divisor, 1), 0)
    return jnp.clip(jnp.round(ratio), CODE_MIN, CODE_MAX)


def _squared_error(grouped: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.square(grouped - _round(grouped, scale) * scale[..., None]).sum(axis=-1)


def _search(grouped: jax.Array, absmax: jax.Array) -> jax.Array:
    """The best scale of each group.

    Every candidate's codes have a best scale of their own, <w, q> / <q, q>, whose error follows from the same
    two sums. Only the winner is compared exactly, with the rule of the largest magnitude.
    """
    largest = jnp.abs(grouped).max(axis=-1)
    steps = jnp.asarray([sign * step for step in _STEPS for sign in (1, -1)], jnp.float32)

    def try_candidate(i: Any, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        codes = _round(grouped, largest / steps[i])
        product, square = (grouped * codes).sum(axis=-1), (codes * codes).sum(axis=-1)
        scale = jnp.where(square > 0, product / jnp.where(square > 0, square, 1), 0).astype(absmax.dtype)
        wide = scale.astype(jnp.float32)
        gain = wide * (2 * product - wide * square)  # by how much it lowers the error of all zeros
        better = gain > best[1]
        return jnp.where(better, scale, best[0]), jnp.where(better, gain, best[1])

    start = (absmax, jnp.full(absmax.shape, -jnp.inf, jnp.float32))
    found, _ = lax.fori_loop(0, len(steps), try_candidate, start)
    wide, widest = found.astype(jnp.float32), absmax.astype(jnp.float32)
    return jnp.where(_squared_error(grouped, wide) < _squared_error(grouped, widest), found, absmax)
