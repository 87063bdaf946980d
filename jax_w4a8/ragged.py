"""Products of rows sorted by group with one packed matrix a group: the shape of ``jax.lax.ragged_dot``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_w4a8.experts.base import check_activation_scheme, check_tokens
from jax_w4a8.experts.gradients import call_grouped_linear
from jax_w4a8.oracle import resolve_backend
from jax_w4a8.weights import LinearWeights


def ragged_dot(
    lhs: ArrayLike,
    rhs: LinearWeights,
    group_sizes: ArrayLike,
    *,
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
) -> jax.Array:
    """What ``jax.lax.ragged_dot(lhs, rhs, group_sizes)`` computes, with INT4 weights and INT8 activations.

    Two of these with a gated activation in between are an MoE layer; :func:`jax_w4a8.fused_experts` does the
    same in one call that also sorts, combines, and keeps what is in between in the cache.

    Args:
      lhs: ``[M, K]``, float32, bfloat16 or float16: first the rows of group 0, then those of group 1, ...
      rhs: a stack of E packed matrices, one a group: :func:`jax_w4a8.pack_linear` of codes ``[E, N, K]``,
        the transpose of the ``[E, K, N]`` that ``jax.lax.ragged_dot`` takes.
      group_sizes: integers ``[E]``. Rows past their sum give zeros.
      activation_scheme: ``asymmetric`` or ``symmetric`` INT8 quantisation of each row.
      backend: ``auto``, ``cpu_int4`` (native) or ``xla`` (pure JAX).

    Returns:
      ``[M, N]`` in the dtype of ``lhs``. A bias packed with a matrix is added to the rows of its group.

    Raises:
      TypeError, ValueError: an argument has the wrong type, dtype, shape or value, or the backend asked for
        can't run here. Negative sizes, or more rows than there are, are found where sizes are known, outside
        ``jit``; inside it they give rows of unspecified groups.
    """
    if not isinstance(rhs, LinearWeights):
        raise TypeError(f"rhs must be LinearWeights (see jax_w4a8.pack_linear), got {type(rhs).__name__}")
    if rhs.codes.ndim != 4:
        raise ValueError(f"rhs must be a stack of matrices (codes [E, NB, G, bytes]), got {rhs.codes.shape}")
    stack = int(rhs.codes.shape[0])
    rhs.check("rhs", (stack,))
    check_activation_scheme(activation_scheme)
    rows = check_tokens(lhs, rhs.in_features, "lhs")
    if rows.ndim != 2:
        raise ValueError(f"lhs must have shape [M, {rhs.in_features}], got {rows.shape}")
    ids = _ids(_check_sizes(group_sizes, stack, rows.shape[0]), rows.shape[0])
    packed = jax.tree.map(jnp.asarray, rhs)
    return call_grouped_linear(resolve_backend(backend), rows, ids, packed, activation_scheme)


def _check_sizes(group_sizes: ArrayLike, stack: int, rows: int) -> jax.Array:
    if not isinstance(group_sizes, jax.core.Tracer):
        group_sizes = np.asarray(group_sizes)
    array = jnp.asarray(group_sizes)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers, got {array.dtype}")
    if array.shape != (stack,):
        raise ValueError(f"group_sizes must have shape {(stack,)}, one for each matrix, got {array.shape}")
    if isinstance(group_sizes, np.ndarray):
        if (group_sizes < 0).any():
            raise ValueError(f"group_sizes must not be negative, got {group_sizes.min()}")
        if (total := int(group_sizes.sum(dtype=np.int64))) > rows:
            raise ValueError(f"group_sizes add up to {total}, and lhs has {rows} rows")
    return array.astype(jnp.int32)


def _ids(group_sizes: jax.Array, rows: int) -> jax.Array:
    """int32 ``[M]``: the group of each row, -1 past the last group."""
    ends = jnp.cumsum(group_sizes)
    ids = jnp.searchsorted(ends, jnp.arange(rows), side="right").astype(jnp.int32)
    return jnp.where(ids < group_sizes.shape[0], ids, -1)
