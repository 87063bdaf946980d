"""Float operations whose bits don't depend on the batch: a row gets what it would get alone.

XLA chooses code by shape. What makes its results depend on the number of rows (measured, jaxlib 0.10 on CPU), and
what these functions do instead:

* Vector and scalar code for exp, rsqrt and their like differ in the last bit, and rows share vectors:
  :func:`evenly` pads rows to whole vectors.
* The order of a sum follows the shape of the whole array: :func:`ordered_sum` fixes it.
* Where a product meets an addition in one loop they become one fused multiply-add: :func:`barrier` parts
  them.
* A matrix product of one row is another routine than one of several, and for small matrices that aren't
  transposed the routine changes with the number of rows: :func:`matmul_transposed` uses the one form that
  doesn't.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

#: The widest vector in elements.
_VECTOR = 16


def barrier(x: jax.Array) -> jax.Array:
    """``x``; the compiler fuses nothing across it."""
    y: jax.Array = lax.optimization_barrier(x)
    return y


def evenly(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``function`` elementwise, in whole vectors along the last axis."""
    size = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % _VECTOR)]
    return barrier(function(barrier(jnp.pad(x, padding))))[..., :size]


def ordered_sum(x: jax.Array) -> jax.Array:
    """Sum of the last axis, kept, in an order that its length alone decides."""
    size = 1 << max(0, x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x


def matmul_transposed(x: jax.Array, y: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """``x @ y.T`` over shared leading axes: ``[*b, R, K]`` and ``[*b, N, K]`` to ``[*b, R, N]``.

    A row's result depends neither on R nor on the leading axes' sizes.

    Args:
      x, y: floating point of one dtype; float32 is multiplied as such.
      dtype: in which products are summed and returned.
    """
    rows = x.shape[-2]
    if rows == 1:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)])
    batch = tuple(range(x.ndim - 2))
    contracted = ((x.ndim - 1,), (y.ndim - 1,))
    product = lax.dot_general(
        x, y, (contracted, (batch, batch)), precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )
    return product[..., :rows, :]
