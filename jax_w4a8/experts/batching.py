"""One batching rule for every operation whose leading operands have a row per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

#: Takes operands without batch axes; gives an array, or several.
Bind = Callable[..., Any]


def batch(
    bind: Bind,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    by_token: Sequence[bool],
    *,
    foldable: bool = True,
) -> tuple[Any, Any]:
    """Batches an operation: a mapped batch of tokens is more tokens, where that copies nothing large.

    Otherwise, as when weights are mapped, the elements of the batch run one after another, each with all
    threads, on the operands that aren't mapped as they are.

    Args:
      bind: the operation.
      operands: arrays; ``dims`` are their batch axes, None where an operand isn't mapped.
      by_token: which operands have a leading token axis; the others are shared by all tokens.
      foldable: whether every result has a leading token axis too.

    Returns:
      The result (or a list of them) and its batch axes, always 0.
    """
    shared = [x for x, d, token in zip(operands, dims, by_token, strict=True) if token and d is None]
    mapped = [x for x, d in zip(operands, dims, strict=True) if d is not None]
    weights_mapped = any(d is not None for d, token in zip(dims, by_token, strict=True) if not token)
    # Folding repeats token operands that aren't mapped: k numbers beside every mapped token, but not every
    # token for the sake of k mapped numbers.
    repeated = sum(map(_bytes, shared)) * _batch_size(operands, dims)
    cheap = repeated <= 2 * sum(map(_bytes, mapped))
    run = _fold if foldable and cheap and not weights_mapped else _loop
    results = run(bind, operands, dims, by_token)
    return results, jax.tree.map(lambda _: 0, results)


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def _batch_size(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)


def _loop(bind: Bind, operands: Sequence[Any], dims: Sequence[int | None], by_token: Sequence[bool]) -> Any:
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True) if d is not None]

    def one(elements: list[jax.Array]) -> Any:
        rest = iter(elements)
        return bind(*(x if d is None else next(rest) for x, d in zip(operands, dims, strict=True)))

    return lax.map(one, mapped)


def _fold(bind: Bind, operands: Sequence[Any], dims: Sequence[int | None], by_token: Sequence[bool]) -> Any:
    size = _batch_size(operands, dims)

    def fold(x: Any, dim: int | None, token: bool) -> Any:
        if not token:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    results = bind(*map(fold, operands, dims, by_token))
    return jax.tree.map(lambda y: y.reshape(size, y.shape[0] // size, *y.shape[1:]), results)
