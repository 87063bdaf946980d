"""What a decoder remembers of the tokens before."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8.models.span import Span

#: What one layer's attention keeps of each token; axis 0 is the batch, and some axis the slots.
LayerCache = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer. A row's token at position p lies in slot p.

    Attributes:
      layers: what each layer keeps, as its attention's ``empty_cache`` makes it.
      lengths: int32 ``[B]``, each row's number of tokens so far.
    """

    layers: tuple[LayerCache, ...]
    lengths: jax.Array


def store(cache: jax.Array, new: jax.Array, span: Span, axis: int) -> jax.Array:
    """The cache with the span's tokens in their slots; padding lands in slots that later tokens take over.

    Args:
      cache: ``[B, ...]`` with S slots along ``axis``; no row's start + T may exceed S.
      new: the same shape with T in place of S.
      span: where each row's tokens begin.
      axis: of the slots, at least 1.

    Returns:
      The new cache; its memory is the old one's where XLA may reuse it.
    """

    def row(index: jax.Array | int, cache: jax.Array) -> jax.Array:
        start = [jnp.int32(0)] * cache.ndim
        start[0], start[axis] = jnp.int32(index), span.starts[index]
        return lax.dynamic_update_slice(cache, lax.dynamic_slice_in_dim(new, index, 1), start)

    return lax.fori_loop(0, len(cache), row, cache)
