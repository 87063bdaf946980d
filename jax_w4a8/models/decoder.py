"""A decoder-only language model whose linear maps and experts run on this package's operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jax_w4a8.models.attention import Attention
from jax_w4a8.models.cache import KVCache, LayerCache
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.generation import Request, TokenStream, generate
from jax_w4a8.models.latent_attention import LatentAttention
from jax_w4a8.models.layers import Embedding, Linear, QuantizedOptions, RMSNorm
from jax_w4a8.models.mlp import DenseMLP, MoE
from jax_w4a8.models.prompts import DEFAULT_CHUNK, PromptIds, TokenIds
from jax_w4a8.models.sampling import Sampling
from jax_w4a8.models.span import Span
from jax_w4a8.oracle import W4A8Int8MoeBackend, resolve_backend
from jax_w4a8.sharding import place_tokens

#: No sampling.
GREEDY = Sampling()


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention | LatentAttention,
        mlp_norm: RMSNorm,
        mlp: DenseMLP | MoE,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: jax.Array, cache: LayerCache, span: Span) -> tuple[jax.Array, LayerCache]:
        """As :meth:`Attention.__call__`."""
        with jax.named_scope("attention_norm"):
            normed = self.attention_norm(x)
        with jax.named_scope("attention"):
            mixed, cache = self.attention(normed, cache, span)
        x = x + mixed
        with jax.named_scope("mlp_norm"):
            normed = self.mlp_norm(x)
        with jax.named_scope("mlp"):
            return x + self.mlp(normed, span), cache


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
        self,
        token_ids: PromptIds,
        max_new_tokens: int = 32,
        *,
        stop_token_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        prefill_chunk: int = DEFAULT_CHUNK,
    ) -> TokenIds:
        """Continues each prompt by the likeliest tokens, unless ``sampling`` says otherwise.

        A row's result has the same bits as if it were alone, whatever the prompts beside it.

        Args:
          token_ids: prompts of one length, integers ``[B, T]``, or a list of B prompts of any lengths.
          max_new_tokens: how many to add, at least 0.
          stop_token_ids: end early, once every row has come to one of these, such as
            ``model.config.eos_token_ids``. A row that ended before the others repeats that id.
          sampling: how each token is chosen, temperature and the like (:class:`Sampling`).
          prefill_chunk: prompt tokens per row that go through the model at once, at least 16. Memory beside
            the cache grows with it and not with the prompt; the result is the same to the bit.

        Returns:
          int32 ``[B, N]``: the new ids alone; N is ``max_new_tokens`` unless all rows ended early.

        Raises:
          TypeError, ValueError: as :meth:`__call__`; also for an empty prompt, more tokens than positions, or
            an option out of range.
        """
        request = Request(max_new_tokens, tuple(stop_token_ids), sampling, prefill_chunk)
        return generate(self, token_ids, request)

    def stream(
        self,
        token_ids: PromptIds,
        max_new_tokens: int = 32,
        *,
        stop_token_ids: Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        prefill_chunk: int = DEFAULT_CHUNK,
    ) -> TokenStream:
        """As :meth:`generate`, but an iterator over each step's ids (int32 ``[B]``) as they are made.

        ``stop_token_ids=None`` takes the model's own end-of-text ids.
        """
        if stop_token_ids is None:
            stop_token_ids = self.config.eos_token_ids
        request = Request(max_new_tokens, tuple(stop_token_ids), sampling, prefill_chunk)
        return TokenStream(self, token_ids, request)

    def with_float_activations(self) -> Decoder:
        """The same weights, in the same memory, on activations in float32 instead of INT8.

        It gives what the checkpoint's weights are worth; W4A8's own result differs from it by what INT8
        activations cost. It is slow: every layer widens its weights at every call.
        """
        model: Decoder = nnx.merge(*nnx.split(self))
        for _, node in nnx.iter_graph(model):
            options = getattr(node, "options", None)
            if isinstance(options, QuantizedOptions):
                node.options = dataclasses.replace(options, float_activations=True)
        return model

    @property
    def backend(self) -> W4A8Int8MoeBackend:
        """The backend that its quantised layers run on."""
        return W4A8Int8MoeBackend(resolve_backend(self.options.backend).name)

    def hidden_states(
        self, token_ids: jax.Array, cache: KVCache, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """States after the last norm, of tokens that follow those in the cache.

        Args:
          token_ids: int32 ``[B, T]``. No row's ``cache.lengths + T`` may exceed the cache's slots.
          cache: of the tokens before.
          lengths: int32 ``[B]``, how many of each row's tokens are text; the rest is padding on the
            right, whose states mean nothing. None: all of them.

        Returns:
          float32 ``[B, T, H]``, and the cache with the text added.
        """
        batch, tokens = token_ids.shape
        span = Span(cache.lengths, jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths, tokens)
        with jax.named_scope("embedding"):
            x = self.embedding(token_ids)
        layers = []
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            x, kept = layer(x, kept, span)
            layers.append(kept)
        with jax.named_scope("final_norm"):
            x = self.final_norm(x)
        return x, KVCache(tuple(layers), span.ends)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 ``[..., H]`` to logits ``[..., V]``."""
        with jax.named_scope("head"):
            return self.embedding.attend(hidden) if self.head is None else self.head(hidden)

    def empty_cache(self, batch: int, positions: int) -> KVCache:
        """A cache for ``batch`` rows of up to ``positions`` tokens, padding included."""
        layers = tuple(layer.attention.empty_cache(batch, positions) for layer in self.layers)
        return KVCache(layers, jnp.zeros(batch, jnp.int32))

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
