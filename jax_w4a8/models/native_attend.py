"""Attention over a cache by the native kernel: what :func:`jax_w4a8.models.attend.attend` computes, on CPU.

Keys and values lie in the cache as the kernel reads them, each turned the other way round than XLA's matrix
products want them. As there, a row's bits depend neither on the batch around it, nor on how many tokens come
per call, nor on the cache's size, and here neither on the number of threads nor on the instruction set.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_w4a8 import ffi
from jax_w4a8.experts.cpu_int4 import batch_by_tokens, define_operation
from jax_w4a8.models.attend import attend
from jax_w4a8.models.span import Span
from jax_w4a8.sharded_calls import on_mesh, vary_together
from jax_w4a8.sharding import LinearSharding

#: Values per head must be a multiple of this.
WIDTH_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is static about a call; ``window`` is 0 for none."""

    scale: float
    window: int
    sharding: LinearSharding | None


def _reference(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    window: int,
) -> jax.Array:
    span = Span(starts, lengths, queries.shape[1])
    mixed = attend(
        queries,
        keys.swapaxes(2, 3),
        values.swapaxes(2, 3),
        span,
        scale=scale,
        window=window or None,
        sinks=sinks if sinks.size else None,
    )
    return jnp.where(span.real[:, :, None, None], mixed, 0)


attend_p = define_operation(
    "attend",
    lambda queries, keys, values, *rest, **parameters: queries.update(
        shape=(*queries.shape[:3], values.shape[3])
    ),
    _reference,
    lambda scale, window: {"scale": ffi.attribute(scale), "window": ffi.attribute(window)},
)
batch_by_tokens(attend_p, 5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, *operands: jax.Array) -> jax.Array:
    def body(*operands: jax.Array) -> jax.Array:
        found: jax.Array = attend_p.bind(*vary_together(operands), scale=options.scale, window=options.window)
        return found

    if options.sharding is None:
        return body(*operands)
    by_row = PartitionSpec(*options.sharding.tokens[:1])
    in_specs = (*[by_row] * 5, PartitionSpec())
    return on_mesh(body, options.sharding.mesh, in_specs, by_row, *operands)


def _forward(options: _Options, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _attend(options, *operands), operands


def _backward(options: _Options, operands: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[Any, ...]:
    """The pure-JAX attention's gradient; like that one's, of whole spans alone."""
    queries, keys, values, starts, lengths, sinks = operands

    def floats(queries: jax.Array, keys: jax.Array, values: jax.Array, sinks: jax.Array) -> jax.Array:
        return _reference(
            queries, keys, values, starts, lengths, sinks, scale=options.scale, window=options.window
        )

    of_queries, of_keys, of_values, of_sinks = jax.vjp(floats, queries, keys, values, sinks)[1](gradient)
    return of_queries, of_keys, of_values, None, None, of_sinks


_attend.defvjp(_forward, _backward)


def attend_native(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    span: Span,
    *,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
    sharding: LinearSharding | None = None,
) -> jax.Array:
    """Causal attention of a span's tokens over the cache, which holds their own keys and values already.

    Args:
      queries: float32 ``[B, T, N, D]``.
      keys: float32 ``[B, M, D, S]``; N is a multiple of M, and S of :data:`jax_w4a8.models.attend.BLOCK`.
      values: float32 ``[B, M, S, V]``; V is a multiple of ``WIDTH_MULTIPLE``. Slots that a token doesn't see
        may hold anything, infinities and NaN included.
      span: which positions the tokens have; padding gets zeros.
      scale, window, sinks: as :func:`jax_w4a8.models.attend.attend`.
      sharding: over which mesh axes the rows of the batch are spread; None for one device.

    Returns:
      float32 ``[B, T, N, V]``; differentiable in reverse mode where the cache holds the span alone.
    """
    operands = (queries, keys, values, span.starts, span.lengths)
    all_sinks = jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    found: jax.Array = _attend(_Options(float(scale), window or 0, sharding), *operands, all_sinks)
    return found
