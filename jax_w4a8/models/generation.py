"""Greedy generation with a KV cache: one program for the prompt, one for each further token."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jax_w4a8.models.cache import KVCache

if TYPE_CHECKING:
    from jax_w4a8.models.decoder import Decoder

#: The cache's length is rounded up to this, so that similar requests share a program.
CACHE_MULTIPLE = 64

TokenIds = np.ndarray[Any, np.dtype[np.int32]]
#: The likeliest next token of each row, int32 ``[B]``, and the cache that led to it.
Made = tuple[jax.Array, KVCache]


@dataclasses.dataclass
class GenerationTimes:
    """Where the time of a generation went.

    Attributes:
      compile_seconds: tracing and compiling the two programs; near 0 when they were there already.
      prefill_seconds, prefill_tokens: the prompts.
      decode_seconds, decode_tokens: tokens after the first new one, which the prompt's program makes.
    """

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 when there was nothing to measure."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second; 0 when there was nothing to measure."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class _Skeleton:
    """A model without its arrays: static under ``jit``, its hash computed once."""

    graphdef: Any
    treedef: Any
    hash_value: int

    def __hash__(self) -> int:
        return self.hash_value

    def model(self, leaves: list[jax.Array]) -> Decoder:
        model: Decoder = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        return model


def _take_apart(model: Decoder) -> tuple[_Skeleton, list[jax.Array]]:
    """Flattened once per generation; flattening modules anew would dominate a decode step."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return _Skeleton(graphdef, treedef, hash((graphdef, treedef))), leaves


@functools.partial(jax.jit, static_argnums=(0, 3))
def _prefill(skeleton: _Skeleton, leaves: list[jax.Array], token_ids: jax.Array, capacity: int) -> Made:
    model = skeleton.model(leaves)
    cache = model.empty_cache(token_ids.shape[0], capacity)
    hidden, cache = model.hidden_states(token_ids, cache)
    return _likeliest(model, hidden[:, -1]), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _step(skeleton: _Skeleton, leaves: list[jax.Array], token: jax.Array, cache: KVCache) -> Made:
    model = skeleton.model(leaves)
    hidden, cache = model.hidden_states(token[:, None], cache)
    return _likeliest(model, hidden[:, 0]), cache


def _likeliest(model: Decoder, hidden: jax.Array) -> jax.Array:
    return jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)


class _Run:
    """One generation: compiles both programs, then gives one token per call."""

    def __init__(self, model: Decoder, token_ids: ArrayLike, max_new_tokens: int) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        self.token_ids = model.check_token_ids(token_ids)
        self.batch, length = self.token_ids.shape
        if length == 0:
            raise ValueError("token_ids must hold at least one token per row, got an empty prompt")
        limit = model.config.max_positions
        if length + max_new_tokens > limit:
            raise ValueError(
                f"max_new_tokens must be at most {max(limit - length, 0)}: the model has {limit} positions "
                f"and the prompt takes {length}, got {max_new_tokens}"
            )
        self.capacity = -(-(length + max_new_tokens) // CACHE_MULTIPLE) * CACHE_MULTIPLE
        self.skeleton, self.leaves = _take_apart(model)
        self.on_mesh = model.options.sharding is not None

    def compile(self, steps: bool) -> None:
        """Compiles what isn't compiled yet; the calls below find it."""
        prefill = _prefill.lower(self.skeleton, self.leaves, self.token_ids, self.capacity)
        compiled = prefill.compile()
        if steps:
            token, cache = prefill.out_info
            if self.on_mesh:
                token, cache = jax.tree.map(_with_sharding, (token, cache), compiled.output_shardings)
            _step.lower(self.skeleton, self.leaves, token, cache).compile()

    def prefill(self) -> Made:
        """The first new token and the cache."""
        made: Made = _prefill(self.skeleton, self.leaves, self.token_ids, self.capacity)
        return made

    def step(self, token: jax.Array, cache: KVCache) -> Made:
        """The token after ``token``; the cache given is used up."""
        made: Made = _step(self.skeleton, self.leaves, token, cache)
        return made


def _with_sharding(info: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)


class _Ends:
    """Keeps account of rows that came to an id which ends them."""

    def __init__(self, stop_token_ids: Sequence[int], batch: int) -> None:
        self._ids = np.asarray(stop_token_ids, np.int32)
        self._last = np.full(batch, -1, np.int32)

    def mask(self, token: TokenIds) -> TokenIds:
        """The row's end id wherever a row ended before, else ``token``."""
        masked = np.where(self._last >= 0, self._last, token)
        self._last = np.where(np.isin(masked, self._ids), masked, -1)
        return masked

    @property
    def all(self) -> bool:
        """Whether every row ended."""
        return bool((self._last >= 0).all())


class GreedyStream:
    """An iterator over the ids of each step, int32 ``[B]``, made as they are asked for.

    Attributes:
      times: filled in along the way.
      batch: B.
    """

    def __init__(
        self, model: Decoder, token_ids: ArrayLike, max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> None:
        """Raises TypeError or ValueError as :meth:`Decoder.generate`."""
        self.times = GenerationTimes()
        self._run = _Run(model, token_ids, max_new_tokens)
        self._max_new_tokens = max_new_tokens
        self.batch = self._run.batch
        self._ends = _Ends(stop_token_ids, self.batch)
        self._tokens = self._steps()

    def __iter__(self) -> Iterator[TokenIds]:
        return self._tokens

    def __next__(self) -> TokenIds:
        return next(self._tokens)

    def _steps(self) -> Iterator[TokenIds]:
        if self._max_new_tokens == 0:
            return
        times = self.times
        start = time.perf_counter()
        self._run.compile(steps=self._max_new_tokens > 1)
        compiled = time.perf_counter()
        times.compile_seconds = compiled - start
        token, cache = self._run.prefill()
        ids = np.asarray(token)
        times.prefill_seconds = time.perf_counter() - compiled
        times.prefill_tokens = self._run.token_ids.size
        yield self._ends.mask(ids)
        for _ in range(self._max_new_tokens - 1):
            if self._ends.all:
                return
            start = time.perf_counter()
            token, cache = self._run.step(token, cache)
            ids = np.asarray(token)
            times.decode_seconds += time.perf_counter() - start
            times.decode_tokens += ids.size
            yield self._ends.mask(ids)


def generate(
    model: Decoder, token_ids: ArrayLike, max_new_tokens: int, stop_token_ids: Sequence[int]
) -> TokenIds:
    """As :meth:`jax_w4a8.models.decoder.Decoder.generate`, whose arguments and errors these are."""
    if len(stop_token_ids):
        stream = GreedyStream(model, token_ids, max_new_tokens, stop_token_ids)
        return _columns(list(stream), stream.batch)
    run = _Run(model, token_ids, max_new_tokens)
    tokens: list[jax.Array] = []
    if max_new_tokens:
        token, cache = run.prefill()
        tokens.append(token)
        for _ in range(max_new_tokens - 1):  # nothing waits for a token, so steps queue up
            token, cache = run.step(token, cache)
            tokens.append(token)
    return _columns([np.asarray(token) for token in tokens], run.batch)


def _columns(tokens: list[TokenIds], batch: int) -> TokenIds:
    """int32 ``[B, N]`` of N times ``[B]``."""
    return np.stack(tokens, axis=1) if tokens else np.empty((batch, 0), np.int32)
