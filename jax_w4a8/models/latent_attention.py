"""Multi-head latent attention (arXiv:2405.04434): keys and values are made of one narrow vector per token.

The cache holds that latent vector and the part of the key that carries the position, for all heads at once,
where keys and values of all heads would be dozens of times as many numbers. They are never made: the map that
would make them (``kv_b_proj``) moves to the other side, its half for keys into the query, its half for values
behind the mixture, so that all heads attend over the latent vectors as their one key and value head.

``kv_b_proj`` is W4A8 as any other map, yet runs in float32 here: the latent vector is rounded to INT8 when it
is cached, and the weight is dequantised when it is loaded, so that their product is the same up to float32's
rounding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_w4a8.experts.xla import quantize_rows
from jax_w4a8.invariance import barrier, matmul_transposed
from jax_w4a8.models.cache import LayerCache
from jax_w4a8.models.config import LatentAttentionConfig
from jax_w4a8.models.layers import Linear, RMSNorm
from jax_w4a8.models.pair_cache import PairCache
from jax_w4a8.models.span import Span

#: Of the norms of latent vectors, whatever the configuration says of other norms.
LATENT_NORM_EPSILON = 1e-6


class LatentQuery(nnx.Module):
    """Queries by way of a latent vector: ``up(norm(down(x)))``."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear) -> None:
        self.down = down
        self.norm = norm
        self.up = up

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32 ``[B, T, H]`` to ``[B, T, N * D]``."""
        return self.up(self.norm(self.down(x)))


class LatentUp(nnx.Module):
    """The map from the latent vector to keys (without positions) and values, split up by head.

    Attributes:
      key: ``[N, rank, nope_dim]``, float32, ready to be multiplied with queries.
      value: ``[N, value_dim, rank]``, float32.
      activation_scheme: how the map's inputs are quantised; None not at all.
    """

    def __init__(self, weight: jax.Array, nope_dim: int, activation_scheme: str | None) -> None:
        """Takes ``[N, nope_dim + value_dim, rank]``, floating point; dequantised if it was INT4."""
        weight = jnp.asarray(weight, jnp.float32)
        self.key = nnx.Param(weight[:, :nope_dim].transpose(0, 2, 1))
        self.value = nnx.Param(weight[:, nope_dim:])
        self.activation_scheme = activation_scheme

    def quantize_input(self, latent: jax.Array) -> jax.Array:
        """Latent vectors ``[B, T, rank]`` as the map sees them: rounded to INT8 if it is W4A8."""
        if self.activation_scheme is None:
            return latent
        rows = quantize_rows(barrier(latent.reshape(-1, latent.shape[-1])), self.activation_scheme)
        values = (rows.codes.astype(jnp.float32) - rows.zero[:, None]) * rows.scale[:, None]
        return barrier(values.reshape(latent.shape))

    def into_query(self, queries: jax.Array) -> jax.Array:
        """Queries ``[B, T, N, nope_dim]`` as queries for latent vectors, ``[B, T, N, rank]``."""
        return _per_head(queries, self.key.get_value())

    def of_mixture(self, mixed: jax.Array) -> jax.Array:
        """Values ``[B, T, N, value_dim]`` of each head's mixture of latent vectors ``[B, T, N, rank]``."""
        return _per_head(mixed, self.value.get_value())


def _per_head(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32 ``[B, T, N, K]`` and ``[N, M, K]`` to ``[B, T, N, M]``."""
    batch, tokens, heads, width = x.shape
    rows = x.transpose(2, 0, 1, 3).reshape(heads, batch * tokens, width)
    product = matmul_transposed(rows, weight)
    return product.reshape(heads, batch, tokens, -1).transpose(1, 2, 0, 3)


class LatentAttention(nnx.Module):
    """Multi-head latent attention."""

    def __init__(
        self,
        config: LatentAttentionConfig,
        query: LatentQuery | Linear,
        latent_down: Linear,
        latent_norm: RMSNorm,
        latent_up: LatentUp,
        output: Linear,
    ) -> None:
        self.config = config
        self.query = query
        self.latent_down = latent_down
        self.latent_norm = latent_norm
        self.latent_up = latent_up
        self.output = output
        self.options = output.options  # the map may be wrapped, as by LoRA

    def __call__(self, x: jax.Array, cache: LayerCache, span: Span) -> tuple[jax.Array, LayerCache]:
        """Attention of a span's tokens over the cache and themselves.

        Args:
          x: float32 ``[B, T, H]``.
          cache: as :attr:`pair` keeps them, for one head: latent vectors and beside them the keys' parts
            with positions as keys, and latent vectors again as values.
          span: which positions the tokens have.

        Returns:
          float32 ``[B, T, H]``, and the cache with the tokens added.
        """
        config = self.config
        table = config.rotary.table(span)
        queries = self.query(x).reshape(*x.shape[:2], config.num_heads, -1)
        plain, turned = jnp.split(queries, [config.nope_dim], axis=-1)
        queries = jnp.concatenate(
            [self.latent_up.into_query(plain), config.rotary.rotate(turned, table)], axis=-1
        )
        latent, key = jnp.split(self.latent_down(x), [config.rank], axis=-1)
        latent = self.latent_up.quantize_input(self.latent_norm(latent))[:, :, None]
        key = config.rotary.rotate(key[:, :, None], table)
        cache = self.pair.store(cache, jnp.concatenate([latent, key], axis=-1), latent, span)
        mixed = self.latent_up.of_mixture(self.pair.attend(queries, cache, span, scale=config.scale))
        return self.output(mixed.reshape(*x.shape[:2], -1)), cache

    def empty_cache(self, batch: int, positions: int) -> LayerCache:
        """A cache for ``batch`` rows of up to ``positions`` tokens."""
        return self.pair.empty(batch, positions)

    @property
    def pair(self) -> PairCache:
        """How latent vectors are kept."""
        config = self.config
        return PairCache(1, config.rank + config.rope_dim, config.rank, self.options)
