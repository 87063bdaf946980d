"""Grouped-query attention with rotary positions; one call serves whole prompts, parts of them and tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_w4a8.models.cache import LayerCache
from jax_w4a8.models.config import AttentionConfig
from jax_w4a8.models.layers import Linear, RMSNorm
from jax_w4a8.models.pair_cache import PairCache
from jax_w4a8.models.span import Span


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
        self.options = output.options  # the map may be wrapped, as by LoRA
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.sinks = None if sinks is None else nnx.Param(sinks)

    def __call__(self, x: jax.Array, cache: LayerCache, span: Span) -> tuple[jax.Array, LayerCache]:
        """Attention of a span's tokens over the cache and themselves.

        Args:
          x: float32 ``[B, T, H]``.
          cache: keys and values of the tokens before, as :attr:`pair` keeps them.
          span: which positions the tokens have.

        Returns:
          float32 ``[B, T, H]``, and the cache with the tokens added.
        """
        config = self.config
        queries, keys, values = self._project(x, span)
        cache = self.pair.store(cache, keys, values, span)
        sinks = None if self.sinks is None else self.sinks.get_value()
        mixed = self.pair.attend(queries, cache, span, scale=config.scale, window=config.window, sinks=sinks)
        return self.output(mixed.reshape(*x.shape[:2], -1)), cache

    def empty_cache(self, batch: int, positions: int) -> LayerCache:
        """A cache for ``batch`` rows of up to ``positions`` tokens."""
        return self.pair.empty(batch, positions)

    @property
    def pair(self) -> PairCache:
        """How keys and values are kept."""
        config = self.config
        return PairCache(config.num_kv_heads, config.head_dim, config.head_dim, self.options)

    def _project(self, x: jax.Array, span: Span) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        queries = self._heads(self.query(x), self.query_norm)
        keys = self._heads(self.key(x), self.key_norm)
        values = self._heads(self.value(x), None)
        table = config.rotary.table(span)
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
