"""Softmax attention over a cache, block of slots by block of slots.

Memory is that of one block's scores, time follows the slots in use rather than the cache's size, and a row's
bits depend neither on the batch around it, nor on how many tokens come per call, nor on the cache's size. The
scheme is the online softmax of Milakov and Gimelshein (2018), as in FlashAttention.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a8.invariance import barrier, evenly, matmul_transposed
from jax_w4a8.models.span import Span

#: Slots per block; caches hold whole blocks.
BLOCK = 128
_LOWEST = float(np.finfo(np.float32).min)
_TINY = float(np.finfo(np.float32).tiny)
_ONES = 8

#: Largest score ``[B, M, R, 1]``, sum of exponentials ``[B, M, R, 1]``, weighted values ``[B, M, R, V]``.
_State = tuple[jax.Array, jax.Array, jax.Array]


def cache_slots(positions: int) -> int:
    """Slots of a cache for that many positions: whole blocks."""
    return -(-positions // BLOCK) * BLOCK


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    span: Span,
    *,
    scale: float,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of a span's tokens over the cache, which holds their own keys and values already.

    Args:
      queries: float32 ``[B, T, N, D]``.
      keys: float32 ``[B, M, S, D]``; N is a multiple of M, whose heads serve N / M query heads each. S is a
        multiple of ``BLOCK`` (:func:`cache_slots`). Slots that a token doesn't see may hold any
        finite values.
      values: float32 ``[B, M, V, S]``: transposed, see :mod:`jax_w4a8.invariance`.
      span: which positions the tokens have.
      scale: multiplies the scores.
      window: how many positions a token sees, its own included; None for all.
      sinks: float32 ``[N]``, a score per head that takes part in the softmax and has no value; None for none.

    Returns:
      float32 ``[B, T, N, V]``.
    """
    batch, tokens, heads, dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    grouped = (queries * scale).reshape(batch, tokens, kv_heads, group, dim)
    rows = grouped.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, tokens * group, dim)

    def add_block(index: jax.Array | int, state: _State) -> _State:
        start = jnp.int32(index) * BLOCK
        visible = span.mask(start + jnp.arange(BLOCK, dtype=jnp.int32), window)
        visible = jnp.repeat(visible, group, axis=1)[:, None]
        block_keys = jax.lax.dynamic_slice_in_dim(keys, start, BLOCK, axis=2)
        block_values = jax.lax.dynamic_slice_in_dim(values, start, BLOCK, axis=3)
        scores = jnp.where(visible, matmul_transposed(rows, block_keys), -jnp.inf)
        return _add(state, scores, block_values)

    first, last = _blocks(span, slots, window)
    start_state = _start(sinks, (batch, kv_heads, tokens, group, values.shape[2]))
    _, total, mixed = jax.lax.fori_loop(first, last, add_block, start_state)
    # A total is at least 1, except for padding that sees nothing: its NaN would get into the cache.
    mixed = mixed / barrier(jnp.broadcast_to(jnp.maximum(total, _TINY), mixed.shape))
    mixed = mixed.reshape(batch, kv_heads, tokens, group, -1).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(batch, tokens, heads, -1)


def _add(state: _State, scores: jax.Array, values: jax.Array) -> _State:
    highest, total, mixed = state
    higher = jnp.maximum(highest, jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    shrink = evenly(jnp.exp, highest - higher)
    weights = evenly(jnp.exp, scores - higher)
    ones = jnp.ones((*values.shape[:2], _ONES, BLOCK), jnp.float32)
    added = matmul_transposed(weights, ones)[..., :1]
    return (
        higher,
        barrier(total * shrink) + added,
        barrier(mixed * shrink) + matmul_transposed(weights, values),
    )


def _start(sinks: jax.Array | None, sizes: tuple[int, int, int, int, int]) -> _State:
    batch, kv_heads, tokens, group, width = sizes
    rows = (batch, kv_heads, tokens * group)
    mixed = jnp.zeros((*rows, width), jnp.float32)
    if sinks is None:
        return jnp.full((*rows, 1), _LOWEST), jnp.zeros((*rows, 1), jnp.float32), mixed
    per_head = sinks.astype(jnp.float32).reshape(kv_heads, 1, group)
    highest = jnp.broadcast_to(per_head, (batch, kv_heads, tokens, group)).reshape(*rows, 1)
    return highest, jnp.ones((*rows, 1), jnp.float32), mixed


def _blocks(span: Span, slots: int, window: int | None) -> tuple[jax.Array | int, jax.Array | int]:
    """The first block that any token sees, and the one after the last.

    Static where the cache holds nothing but the span itself: loops of unknown length have no gradient.
    """
    if slots == cache_slots(span.tokens):
        return 0, slots // BLOCK
    last = -(-span.ends.max() // BLOCK)
    if window is None:
        return jnp.int32(0), last
    return jnp.maximum(span.starts.min() - window + 1, 0) // BLOCK, last
