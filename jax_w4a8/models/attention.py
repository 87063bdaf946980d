"""Causal attention with rotary positions; one call serves whole prompts, parts of them and single tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_w4a8.invariance import barrier, evenly
from jax_w4a8.models.attend import attend, cache_slots
from jax_w4a8.models.cache import LayerCache, store
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.layers import Linear, RMSNorm
from jax_w4a8.models.span import Span


def rotary_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the default rotary embedding, float32 ``[..., head_dim]``, for int32 ``[...]``."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[..., None] * (1.0 / theta**exponents)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return evenly(jnp.cos, angles), evenly(jnp.sin, angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + D/2) of ``[B, T, heads, D]`` by their positions' angles, ``[B, T, D]``."""
    cosines, sines = (part[..., None, :] for part in table)
    first, second = jnp.split(x, 2, axis=-1)
    return barrier(x * cosines) + barrier(jnp.concatenate([-second, first], axis=-1) * sines)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, and norms of queries and keys if a family has them."""

    def __init__(
        self,
        config: DecoderConfig,
        query: Linear,
        key: Linear,
        value: Linear,
        output: Linear,
        query_norm: RMSNorm | None,
        key_norm: RMSNorm | None,
    ) -> None:
        self.config = config
        self.query = query
        self.key = key
        self.value = value
        self.output = output
        self.query_norm = query_norm
        self.key_norm = key_norm

    def __call__(self, x: jax.Array, cache: LayerCache, span: Span) -> tuple[jax.Array, LayerCache]:
        """Attention of a span's tokens over the cache and themselves.

        Args:
          x: float32 ``[B, T, H]``.
          cache: keys float32 ``[B, M, S, D]`` and values float32 ``[B, M, D, S]`` of the tokens before.
          span: which positions the tokens have.

        Returns:
          float32 ``[B, T, H]``, and the cache with the tokens added.
        """
        queries, keys, values = self._project(x, span)
        cache = (
            store(cache[0], keys.transpose(0, 2, 1, 3), span, axis=2),
            store(cache[1], values.transpose(0, 2, 3, 1), span, axis=3),
        )
        mixed = attend(queries, *cache, span, scale=self.config.head_dim**-0.5)
        return self.output(mixed.reshape(*x.shape[:2], -1)), cache

    def empty_cache(self, batch: int, positions: int) -> LayerCache:
        """A cache for ``batch`` rows of up to ``positions`` tokens."""
        heads, dim, slots = self.config.num_kv_heads, self.config.head_dim, cache_slots(positions)
        return (
            jnp.zeros((batch, heads, slots, dim), jnp.float32),
            jnp.zeros((batch, heads, dim, slots), jnp.float32),
        )

    def _project(self, x: jax.Array, span: Span) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        lead = x.shape[:2]
        queries = self.query(x).reshape(*lead, config.num_heads, config.head_dim)
        keys = self.key(x).reshape(*lead, config.num_kv_heads, config.head_dim)
        values = self.value(x).reshape(*lead, config.num_kv_heads, config.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        table = rotary_table(span.positions, config.head_dim, config.rope_theta)
        return rotate(queries, table), rotate(keys, table), values
