"""Multi-head latent attention (arXiv:2405.04434): keys and values are made of one narrow vector per token.

The cache holds that latent vector and the part of the key that carries the position, for all heads at once:
rank + rope_dim numbers per token, where keys and values of all heads would be dozens of times as many.

The map from the latent vector to keys and values (``kv_b_proj``) is W4A8 as any other, but runs in float32: the
latent vector is quantised when it is cached, and the weight is dequantised when it is loaded, so that their
product is the same up to float32's rounding. That lets one token skip the keys and values of all positions: it
moves the map to the other side, into the query and behind the mixture. Prompts make keys and values instead,
which takes fewer operations as soon as there are many queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_w4a8.experts.xla import quantize_rows
from jax_w4a8.models.attention import LayerCache, attend, remember
from jax_w4a8.models.config import LatentAttentionConfig
from jax_w4a8.models.layers import Linear, QuantizedOptions, RMSNorm
from jax_w4a8.models.span import Span

_HIGHEST = lax.Precision.HIGHEST

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
    """The map from the latent vector to keys without positions and values, head by head.

    Attributes:
      weight: ``[N, nope_dim + value_dim, rank]``, floating point; dequantised if it was INT4.
      activation_scheme: how its inputs are quantised; None not at all.
    """

    def __init__(self, weight: jax.Array, activation_scheme: str | None) -> None:
        self.weight = nnx.Param(weight)
        self.activation_scheme = activation_scheme

    def quantize_input(self, latent: jax.Array) -> jax.Array:
        """The latent vectors ``[B, T, rank]`` that the map sees: rounded to INT8 if it is W4A8."""
        if self.activation_scheme is None:
            return latent
        rows = quantize_rows(latent.reshape(-1, latent.shape[-1]), self.activation_scheme)
        values = (rows.codes.astype(jnp.float32) - rows.zero[:, None]) * rows.scale[:, None]
        return values.reshape(latent.shape)

    def parts(self, nope_dim: int) -> tuple[jax.Array, jax.Array]:
        """Weights of keys ``[N, nope_dim, rank]`` and values ``[N, value_dim, rank]``, float32."""
        weight = self.weight.get_value().astype(jnp.float32)
        return weight[:, :nope_dim], weight[:, nope_dim:]


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

    def __call__(self, x: jax.Array, cache: LayerCache, span: Span) -> tuple[jax.Array, LayerCache]:
        """Attention of T tokens over the cache and themselves.

        Args:
          x: float32 ``[B, T, H]``.
          cache: latent vectors ``[B, S, 1, rank]`` and the keys' parts with positions ``[B, S, 1, rope_dim]``,
            float32, filled up to ``span.start``.
          span: where the tokens stand.

        Returns:
          float32 ``[B, T, H]``, and the cache filled up to ``span.start + T``.
        """
        config = self.config
        table = config.rotary.table(span.positions)
        queries = self.query(x).reshape(*x.shape[:2], config.num_heads, -1)
        plain, turned = queries[..., : config.nope_dim], queries[..., config.nope_dim :]
        turned = config.rotary.rotate(turned, table)
        latent, key = jnp.split(self.latent_down(x)[:, :, None], [config.rank], axis=-1)
        latent = self.latent_up.quantize_input(self.latent_norm(latent))
        cache = remember(cache, latent, config.rotary.rotate(key, table), span)
        mask = span.mask(cache[0].shape[1])
        mixed = (self._absorb if x.shape[1] == 1 else self._expand)(plain, turned, cache, mask)
        return self.output(mixed.reshape(*x.shape[:2], -1)), cache

    def _absorb(self, plain: jax.Array, turned: jax.Array, cache: LayerCache, mask: jax.Array) -> jax.Array:
        """Attends over latent vectors, as the one key and value head of all query heads."""
        key_weight, value_weight = self.latent_up.parts(self.config.nope_dim)
        latent = jnp.einsum("btnd,ndr->btnr", plain, key_weight, precision=_HIGHEST)
        queries = jnp.concatenate([latent, turned], axis=-1)
        keys = jnp.concatenate(cache, axis=-1)
        mixed = attend(queries, keys, cache[0], mask, self.config.scale)
        return jnp.einsum("btnr,nvr->btnv", mixed, value_weight, precision=_HIGHEST)

    def _expand(self, plain: jax.Array, turned: jax.Array, cache: LayerCache, mask: jax.Array) -> jax.Array:
        """Makes every position's keys and values out of its latent vector."""
        key_weight, value_weight = self.latent_up.parts(self.config.nope_dim)
        latent = cache[0][:, :, 0]
        keys = jnp.einsum("bsr,ndr->bsnd", latent, key_weight, precision=_HIGHEST)
        values = jnp.einsum("bsr,nvr->bsnv", latent, value_weight, precision=_HIGHEST)
        shared = jnp.broadcast_to(cache[1], (*keys.shape[:3], self.config.rope_dim))
        queries = jnp.concatenate([plain, turned], axis=-1)
        keys = jnp.concatenate([keys, shared], axis=-1)
        return attend(queries, keys, values, mask, self.config.scale)
