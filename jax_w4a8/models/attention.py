"""Grouped-query attention with rotary positions; one function serves whole prompts and single tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_w4a8.models.config import AttentionConfig
from jax_w4a8.models.layers import Linear, RMSNorm
from jax_w4a8.models.span import Span

_HIGHEST = lax.Precision.HIGHEST

#: What a layer remembers of the tokens before: float32 ``[B, S, heads, D]`` each.
LayerCache = tuple[jax.Array, jax.Array]


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of T tokens over S positions.

    Args:
      queries: float32 ``[B, T, N, D]``.
      keys: float32 ``[B, S, M, D]``; N is a multiple of M, whose heads serve N / M query heads each.
      values: float32 ``[B, S, M, V]``.
      mask: bool ``[B, T, S]``: which positions a token sees. The others are never looked at, whatever finite
        values they hold.
      scale: multiplies the scores.
      sinks: float32 ``[N]``, a logit for each head that takes its share of the softmax and adds nothing.

    Returns:
      float32 ``[B, T, N, V]``.
    """
    batch, tokens, heads, dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btmgd,bsmd->bmgts", grouped, keys, precision=_HIGHEST) * scale
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    if sinks is None:
        probabilities = jax.nn.softmax(scores, axis=-1)
    else:
        probabilities = _softmax_beside(scores, sinks.reshape(kv_heads, -1, 1, 1))
    mixed = jnp.einsum("bmgts,bsmd->btmgd", probabilities, values, precision=_HIGHEST)
    return mixed.reshape(batch, tokens, heads, values.shape[-1])


def _softmax_beside(scores: jax.Array, logit: jax.Array) -> jax.Array:
    """Softmax over the last axis and one more ``logit`` (broadcast), without the latter's share."""
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), logit)
    powers = jnp.exp(scores - peak)
    return powers / (powers.sum(axis=-1, keepdims=True) + jnp.exp(logit - peak))


def remember(cache: LayerCache, first: jax.Array, second: jax.Array, span: Span) -> LayerCache:
    """The cache with float32 ``[B, T, heads, D]`` written from ``span.start`` on."""
    return (
        lax.dynamic_update_slice_in_dim(cache[0], first, span.start, axis=1),
        lax.dynamic_update_slice_in_dim(cache[1], second, span.start, axis=1),
    )


class Attention(nnx.Module):
    """Grouped-query attention; norms, clipping, window and sinks as the family has them."""

    def __init__(
        self,
        config: AttentionConfig,
        query: Linear,
        key: Linear,
        value: Linear,
        output: Linear,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
        sinks: jax.Array | None = None,
    ) -> None:
        self.config = config
        self.query = query
        self.key = key
        self.value = value
        self.output = output
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.sinks = None if sinks is None else nnx.Param(sinks)

    def __call__(self, x: jax.Array, cache: LayerCache, span: Span) -> tuple[jax.Array, LayerCache]:
        """Attention of T tokens over the cache and themselves.

        Args:
          x: float32 ``[B, T, H]``.
          cache: keys and values, float32 ``[B, S, M, D]``, filled up to ``span.start``.
          span: where the tokens stand.

        Returns:
          float32 ``[B, T, H]``, and the cache filled up to ``span.start + T``.
        """
        config = self.config
        queries, keys, values = self._project(x, span)
        cache = remember(cache, keys, values, span)
        mask = span.mask(cache[0].shape[1], config.window)
        sinks = None if self.sinks is None else self.sinks.get_value().astype(jnp.float32)
        mixed = attend(queries, *cache, mask, config.scale, sinks)
        return self.output(mixed.reshape(*x.shape[:2], -1)), cache

    def _project(self, x: jax.Array, span: Span) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        queries = self._heads(self.query(x), self.query_norm)
        keys = self._heads(self.key(x), self.key_norm)
        values = self._heads(self.value(x), None)
        table = config.rotary.table(span.positions)
        return config.rotary.rotate(queries, table), config.rotary.rotate(keys, table), values

    def _heads(self, x: jax.Array, norm: RMSNorm | None) -> jax.Array:
        """A projection ``[B, T, heads * D]``, normalised and clipped, as ``[B, T, heads, D]``."""
        config = self.config
        if norm is not None and config.norm == "projection":
            x = norm(x)
        if config.clip is not None:
            x = jnp.clip(x, -config.clip, config.clip)
        x = x.reshape(*x.shape[:2], -1, config.head_dim)
        return norm(x) if norm is not None and config.norm == "head" else x
