"""Causal attention with rotary positions; one function serves whole prompts and single tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.layers import Linear, RMSNorm

_HIGHEST = lax.Precision.HIGHEST


def rotary_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the default rotary embedding, float32 ``[T, head_dim]``, for int32 ``[T]``."""
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    angles = positions.astype(jnp.float32)[:, None] * (1.0 / theta**exponents)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs (i, i + D/2) of ``[B, T, heads, D]`` by their positions' angles."""
    cosines, sines = (part[:, None, :] for part in table)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cosines + jnp.concatenate([-second, first], axis=-1) * sines


def attend(queries: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array | int) -> jax.Array:
    """Causal attention of T tokens, of which the first has position ``start``, over S positions.

    Args:
      queries: float32 ``[B, T, N, D]``.
      keys, values: float32 ``[B, S, M, D]``; N is a multiple of M, whose heads serve N / M query heads each.
        Positions past ``start + T`` are never looked at, whatever finite values they hold.
      start: position of the first query.

    Returns:
      float32 ``[B, T, N, D]``.
    """
    batch, tokens, heads, dim = queries.shape
    positions, kv_heads = keys.shape[1:3]
    grouped = queries.reshape(batch, tokens, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btmgd,bsmd->bmgts", grouped, keys, precision=_HIGHEST) * dim**-0.5
    visible = jnp.arange(positions) <= start + jnp.arange(tokens)[:, None]
    probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bmgts,bsmd->btmgd", probabilities, values, precision=_HIGHEST)
    return mixed.reshape(batch, tokens, heads, dim)


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

    def __call__(
        self,
        x: jax.Array,
        cache: tuple[jax.Array, jax.Array],
        start: jax.Array | int,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attention of T tokens from position ``start`` over the cache and themselves.

        Args:
          x: float32 ``[B, T, H]``.
          cache: keys and values, float32 ``[B, S, M, D]``, filled up to ``start``.
          start: position of the first token.

        Returns:
          float32 ``[B, T, H]``, and the cache filled up to ``start + T``.
        """
        queries, keys, values = self._project(x, start)
        cache = (
            lax.dynamic_update_slice_in_dim(cache[0], keys, start, axis=1),
            lax.dynamic_update_slice_in_dim(cache[1], values, start, axis=1),
        )
        mixed = attend(queries, *cache, start)
        return self.output(mixed.reshape(*x.shape[:2], -1)), cache

    def _project(self, x: jax.Array, start: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        lead = x.shape[:2]
        queries = self.query(x).reshape(*lead, config.num_heads, config.head_dim)
        keys = self.key(x).reshape(*lead, config.num_kv_heads, config.head_dim)
        values = self.value(x).reshape(*lead, config.num_kv_heads, config.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        table = rotary_table(start + jnp.arange(x.shape[1]), config.head_dim, config.rope_theta)
        return rotate(queries, table), rotate(keys, table), values
