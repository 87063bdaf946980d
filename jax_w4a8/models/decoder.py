"""A decoder-only language model whose linear maps and experts run on this package's operations."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jax_w4a8.models.attention import Attention
from jax_w4a8.models.cache import KVCache
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.generation import GreedyStream, generate
from jax_w4a8.models.layers import Embedding, Linear, QuantizedOptions, RMSNorm
from jax_w4a8.models.mlp import DenseMLP, MoE
from jax_w4a8.oracle import W4A8Int8MoeBackend, resolve_backend
from jax_w4a8.sharding import place_tokens


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: DenseMLP | MoE,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: jax.Array, cache: tuple[jax.Array, jax.Array], start: jax.Array | int
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """As :meth:`Attention.__call__`."""
        mixed, cache = self.attention(self.attention_norm(x), cache, start)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A decoder-only language model.

    Attributes:
      config: its sizes and switches.
      options: how its quantised layers run.
      head: the output head; None when the embedding serves as one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        options: QuantizedOptions,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear | None,
    ) -> None:
        self.config = config
        self.options = options
        self.embedding = embedding
        self.layers = nnx.List(layers)
        self.final_norm = final_norm
        self.head = head

    def __call__(self, token_ids: ArrayLike) -> jax.Array:
        """Logits of every position; compiled once per shape.

        Args:
          token_ids: integers ``[B, T]``.

        Returns:
          float32 ``[B, T, V]``.

        Raises:
          TypeError, ValueError: ids aren't integers of that shape, or lie outside the vocabulary.
        """
        logits: jax.Array = _logits(self, self.check_token_ids(token_ids))
        return logits

    def generate(
        self, token_ids: ArrayLike, max_new_tokens: int = 32, *, stop_token_ids: Sequence[int] = ()
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Continues each row with the likeliest token (the lowest id among equals), again and again.

        Args:
          token_ids: prompts of one length, integers ``[B, T]``.
          max_new_tokens: how many to add, at least 0.
          stop_token_ids: end early, once every row has come to one of these, such as
            ``model.config.eos_token_ids``. A row that ended before the others repeats that id.

        Returns:
          int32 ``[B, N]``: the new ids alone; N is ``max_new_tokens`` unless all rows ended early.

        Raises:
          TypeError, ValueError: as :meth:`__call__`; also for an empty prompt, or more tokens than positions.
        """
        return generate(self, token_ids, max_new_tokens, stop_token_ids)

    def stream(
        self, token_ids: ArrayLike, max_new_tokens: int = 32, *, stop_token_ids: Sequence[int] | None = None
    ) -> GreedyStream:
        """As :meth:`generate`, but an iterator over each step's ids (int32 ``[B]``) as they are made.

        ``stop_token_ids=None`` takes the model's own end-of-text ids.
        """
        if stop_token_ids is None:
            stop_token_ids = self.config.eos_token_ids
        return GreedyStream(self, token_ids, max_new_tokens, stop_token_ids)

    @property
    def backend(self) -> W4A8Int8MoeBackend:
        """The backend that its quantised layers run on."""
        return W4A8Int8MoeBackend(resolve_backend(self.options.backend).name)

    def hidden_states(self, token_ids: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """States after the last norm, float32 ``[B, T, H]``, of tokens that follow those in the cache."""
        x = self.embedding(token_ids)
        layers = []
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            x, kept = layer(x, kept, cache.length)
            layers.append(kept)
        return self.final_norm(x), KVCache(tuple(layers), cache.length + token_ids.shape[1])

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 ``[..., H]`` to logits ``[..., V]``."""
        return self.embedding.attend(hidden) if self.head is None else self.head(hidden)

    def empty_cache(self, batch: int, positions: int) -> KVCache:
        """A cache for ``batch`` rows of up to ``positions`` tokens."""
        config = self.config
        shape = (batch, positions, config.num_kv_heads, config.head_dim)
        layers = tuple(
            (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)) for _ in range(config.num_layers)
        )
        return KVCache(layers, jnp.int32(0))

    def check_token_ids(self, token_ids: ArrayLike) -> jax.Array:
        """``token_ids`` as int32 ``[B, T]``, else TypeError or ValueError."""
        array = token_ids if isinstance(token_ids, jax.Array) else np.asarray(token_ids)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"token_ids must be integers, got {array.dtype}")
        if array.ndim != 2:
            raise ValueError(f"token_ids must have shape [B, T], got {array.shape}")
        if not isinstance(array, jax.core.Tracer) and array.size:
            lowest, highest = int(array.min()), int(array.max())
            if lowest < 0 or highest >= self.config.vocab_size:
                worst = lowest if lowest < 0 else highest
                raise ValueError(f"token_ids must lie in [0, {self.config.vocab_size}), found {worst}")
        ids = jnp.asarray(array, jnp.int32)
        sharding = self.options.sharding
        if sharding is None or isinstance(array, jax.core.Tracer):
            return ids
        return place_tokens(ids, sharding)


@jax.jit
def _logits(model: Decoder, token_ids: jax.Array) -> jax.Array:
    hidden, _ = model.hidden_states(token_ids, model.empty_cache(*token_ids.shape))
    return model.logits(hidden)
