"""A cache of keys and values per head, laid out for whichever attention runs on it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_w4a8.models.attend import attend, cache_slots
from jax_w4a8.models.cache import LayerCache, store
from jax_w4a8.models.layers import QuantizedOptions
from jax_w4a8.models.native_attend import WIDTH_MULTIPLE, attend_native
from jax_w4a8.models.span import Span
from jax_w4a8.oracle import W4A8Int8MoeBackend, resolve_backend


@dataclasses.dataclass(frozen=True)
class PairCache:
    """How keys ``[B, T, M, K]`` and values ``[B, T, M, V]`` are kept, and attended over.

    Attributes:
      heads: M.
      key_dim, value_dim: K and V.
      options: of the model; its backend decides on the attention, and thereby on the layout.
    """

    heads: int
    key_dim: int
    value_dim: int
    options: QuantizedOptions

    @property
    def native(self) -> bool:
        """Whether the native kernel runs on it."""
        backend = resolve_backend(self.options.backend).name
        return backend == W4A8Int8MoeBackend.CPU_INT4.value and self.value_dim % WIDTH_MULTIPLE == 0

    def empty(self, batch: int, positions: int) -> LayerCache:
        """Zeros for up to ``positions`` tokens of each row."""
        slots = cache_slots(positions)
        keys, values = (slots, self.key_dim), (self.value_dim, slots)
        if self.native:
            keys, values = keys[::-1], values[::-1]
        return (
            jnp.zeros((batch, self.heads, *keys), jnp.float32),
            jnp.zeros((batch, self.heads, *values), jnp.float32),
        )

    def store(self, cache: LayerCache, keys: jax.Array, values: jax.Array, span: Span) -> LayerCache:
        """The cache with a span's keys and values."""
        slots_behind, slots_before = (0, 2, 3, 1), (0, 2, 1, 3)
        if self.native:
            return (
                store(cache[0], keys.transpose(slots_behind), span, axis=3),
                store(cache[1], values.transpose(slots_before), span, axis=2),
            )
        return (
            store(cache[0], keys.transpose(slots_before), span, axis=2),
            store(cache[1], values.transpose(slots_behind), span, axis=3),
        )

    def attend(
        self,
        queries: jax.Array,
        cache: LayerCache,
        span: Span,
        *,
        scale: float,
        window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """As :func:`jax_w4a8.models.attend.attend`, over the cache with the span's tokens in it."""
        keys, values = cache
        if not self.native:
            return attend(queries, keys, values, span, scale=scale, window=window, sinks=sinks)
        sharding = self.options.linear_sharding
        return attend_native(
            queries, keys, values, span, scale=scale, window=window, sinks=sinks, sharding=sharding
        )
