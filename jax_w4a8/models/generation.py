"""Generation with a KV cache: prompts go through the model in chunks, then tokens one by one."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_w4a8.models.attend import cache_slots
from jax_w4a8.models.cache import KVCache
from jax_w4a8.models.prompts import SMALLEST_CHUNK, PromptIds, Prompts, TokenIds, check_prompts
from jax_w4a8.models.sampling import Numbers, Rules, SamplerState, Sampling, choose, start_sampler

if TYPE_CHECKING:
    from jax_w4a8.models.decoder import Decoder

_Value = TypeVar("_Value")

#: Caches have a power of two of slots up to this and a multiple of it beyond, so that programs are shared.
CACHE_MULTIPLE = 1024


@dataclasses.dataclass
class GenerationTimes:
    """Where the time of a generation went.

    Attributes:
      compile_seconds: tracing and compiling the programs; near 0 when they were there already.
      prefill_seconds, prefill_tokens: the prompts.
      decode_seconds, decode_tokens: tokens after the first new one, which comes with the prompt.
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
class Request:
    """What a generation is asked for beside its prompts.

    Attributes:
      max_new_tokens: tokens to add to each row, at least 0.
      stop_token_ids: ids that end a row.
      sampling: how tokens are chosen.
      prefill_chunk: prompt tokens per row that go through the model at once. It bounds the memory that a long
        prompt needs beside the cache, and changes no bit of the result.

    Raises:
      TypeError, ValueError: on construction, naming the attribute.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    prefill_chunk: int

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {self.max_new_tokens}")
        if self.prefill_chunk < SMALLEST_CHUNK:
            raise ValueError(f"prefill_chunk must be at least {SMALLEST_CHUNK}, got {self.prefill_chunk}")
        if not isinstance(self.sampling, Sampling):
            raise TypeError(f"sampling must be a Sampling, got {self.sampling!r}")
        if any(isinstance(i, bool) or not isinstance(i, int | np.integer) for i in self.stop_token_ids):
            raise TypeError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")


class _Static(Generic[_Value]):
    """A static argument of the programs below: one object for all equal values, compared by identity.

    ``jit`` compares static arguments in every call. For two models without their arrays that takes time in
    every decode step, the more the more layers there are, and JAX turns whatever Python raises in a
    comparison, a Ctrl-C too, into a ValueError.
    """

    def __init__(self, value: _Value) -> None:
        self.value = value

    @classmethod
    def of(cls, value: _Value) -> _Static[_Value]:
        """The one for ``value``, which lives as long as a caller or one of JAX's caches needs it."""
        return _STATICS.setdefault(value, cls(value))


_STATICS: weakref.WeakValueDictionary[Any, _Static[Any]] = weakref.WeakValueDictionary()


class _Skeleton(NamedTuple):
    """A model without its arrays."""

    graphdef: Any
    treedef: Any

    def model(self, leaves: list[jax.Array]) -> Decoder:
        model: Decoder = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        return model


def _take_apart(model: Decoder) -> tuple[_Static[_Skeleton], list[jax.Array]]:
    """Flattened once per generation; flattening modules anew would dominate a decode step."""
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return _Static.of(_Skeleton(graphdef, treedef)), leaves


#: The state of each row's last token, float32 ``[B, H]``, and the cache up to it.
_Read = tuple[jax.Array, KVCache]
#: The next token of each row, int32 ``[B]``, and what the one after it depends on.
_Made = tuple[jax.Array, KVCache, SamplerState]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _prefill(
    skeleton: _Static[_Skeleton], leaves: list[jax.Array], ids: jax.Array, lengths: jax.Array, capacity: int
) -> _Read:
    """The first chunk of the prompts."""
    model = skeleton.value.model(leaves)
    cache = model.empty_cache(ids.shape[0], capacity)
    hidden, cache = model.hidden_states(ids, cache, lengths)
    return _last(hidden, lengths), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(4, 5))
def _extend(
    skeleton: _Static[_Skeleton],
    leaves: list[jax.Array],
    ids: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    cache: KVCache,
) -> _Read:
    """A further chunk; rows that ended before keep their last state."""
    hidden, cache = skeleton.value.model(leaves).hidden_states(ids, cache, lengths)
    return jnp.where(lengths[:, None] > 0, _last(hidden, lengths), last), cache


def _last(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """``[B, T, H]`` to ``[B, H]``: each row's last real token."""
    index = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, index, axis=1)[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 7))
def _begin(
    skeleton: _Static[_Skeleton],
    leaves: list[jax.Array],
    last: jax.Array,
    ids: jax.Array,
    lengths: jax.Array,
    seeds: jax.Array,
    numbers: Numbers,
    rules: _Static[Rules],
) -> tuple[jax.Array, SamplerState]:
    """The first new token of each row."""
    model = skeleton.value.model(leaves)
    logits = model.logits(last)
    state = start_sampler(rules.value, seeds, ids, lengths, logits.shape[-1])
    return choose(logits, state, rules.value, numbers)


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=(3, 4))
def _step(
    skeleton: _Static[_Skeleton],
    leaves: list[jax.Array],
    token: jax.Array,
    cache: KVCache,
    state: SamplerState,
    numbers: Numbers,
    rules: _Static[Rules],
) -> _Made:
    """The token after ``token``."""
    model = skeleton.value.model(leaves)
    hidden, cache = model.hidden_states(token[:, None], cache)
    token, state = choose(model.logits(hidden[:, 0]), state, rules.value, numbers)
    return token, cache, state


class _Run:
    """One generation: compiles its programs, then gives one token per row and call."""

    def __init__(self, model: Decoder, prompts: Prompts, request: Request) -> None:
        self.prompts = prompts
        self.batch = len(prompts.ids)
        _check_lengths(prompts.longest, request.max_new_tokens, model.config.max_positions)
        self.chunks = [
            (model.check_token_ids(chunk.ids), chunk.lengths)
            for chunk in prompts.chunks(request.prefill_chunk)
        ]
        read = sum(ids.shape[1] for ids, _ in self.chunks)
        self.capacity = _capacity(max(read, prompts.longest + request.max_new_tokens))
        self.skeleton, self.leaves = _take_apart(model)
        self.on_mesh = model.options.sharding is not None
        self.rules, self.numbers = _Static.of(request.sampling.rules), request.sampling.numbers
        self.seeds = request.sampling.seeds(self.batch)
        seen = prompts.ids if request.sampling.rules.uses_penalty else prompts.ids[:, :0]
        self.seen = np.pad(seen, ((0, 0), (0, -seen.shape[1] % SMALLEST_CHUNK)))

    def compile(self, steps: bool) -> None:
        """Compiles what isn't compiled yet; the calls below find it."""
        ids, lengths = self.chunks[0]
        last, cache = self._compile(_prefill, self.skeleton, self.leaves, ids, lengths, self.capacity)
        for ids, lengths in self.chunks[1:]:
            last, cache = self._compile(_extend, self.skeleton, self.leaves, ids, lengths, last, cache)
        token, state = self._compile(_begin, self.skeleton, self.leaves, last, *self._start())
        if steps:
            self._compile(_step, self.skeleton, self.leaves, token, cache, state, self.numbers, self.rules)

    def _compile(self, function: Any, *arguments: Any) -> Any:
        """What ``function`` will return, as shapes, and on a mesh as shardings."""
        lowered = function.lower(*arguments)
        compiled = lowered.compile()
        if not self.on_mesh:
            return lowered.out_info
        return jax.tree.map(_with_sharding, lowered.out_info, compiled.output_shardings)

    def prefill(self) -> _Made:
        """The first new token."""
        (ids, lengths), *further = self.chunks
        last, cache = _prefill(self.skeleton, self.leaves, ids, lengths, self.capacity)
        for ids, lengths in further:
            last, cache = _extend(self.skeleton, self.leaves, ids, lengths, last, cache)
        token, state = _begin(self.skeleton, self.leaves, last, *self._start())
        return token, cache, state

    def step(self, token: jax.Array, cache: KVCache, state: SamplerState) -> _Made:
        """The token after ``token``; cache and state are used up."""
        made: _Made = _step(self.skeleton, self.leaves, token, cache, state, self.numbers, self.rules)
        return made

    def _start(self) -> tuple[Any, ...]:
        return self.seen, self.prompts.lengths, self.seeds, self.numbers, self.rules


def _check_lengths(longest: int, max_new_tokens: int, limit: int) -> None:
    if longest > limit:
        raise ValueError(
            f"token_ids must hold at most {limit} tokens per row, the model's positions, got {longest}"
        )
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens must be at most {limit - longest}: the model has {limit} positions and the "
            f"longest prompt takes {longest}, got {max_new_tokens}"
        )


def _capacity(positions: int) -> int:
    power = 1 << (positions - 1).bit_length()
    return cache_slots(power if power <= CACHE_MULTIPLE else -(-positions // CACHE_MULTIPLE) * CACHE_MULTIPLE)


def _with_sharding(info: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)


class _Ends:
    """Keeps account of rows that ended, by an id or by :meth:`end`."""

    def __init__(self, stop_token_ids: Sequence[int], batch: int) -> None:
        self._ids = np.asarray(stop_token_ids, np.int32)
        self._last = np.zeros(batch, np.int32)
        self._ended = np.zeros(batch, bool)

    def mask(self, token: TokenIds) -> TokenIds:
        """The row's last id wherever a row ended before, else ``token``."""
        self._last = np.where(self._ended, self._last, token)
        self._ended |= np.isin(self._last, self._ids)
        return self._last

    def end(self, row: int) -> None:
        self._ended[row] = True

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool ``[B]``: which rows ended."""
        return self._ended.copy()


class TokenStream:
    """An iterator over the ids of each step, int32 ``[B]``, made as they are asked for.

    It ends after ``max_new_tokens`` steps, or once every row has ended. A row that ended before the others
    repeats its last id.

    Attributes:
      times: filled in along the way.
      batch: B.
    """

    def __init__(self, model: Decoder, token_ids: PromptIds, request: Request) -> None:
        """Raises TypeError or ValueError as :meth:`Decoder.generate`."""
        self.times = GenerationTimes()
        self._run = _Run(model, check_prompts(token_ids, model.config.vocab_size), request)
        self._max_new_tokens = request.max_new_tokens
        self.batch = self._run.batch
        self._ends = _Ends(request.stop_token_ids, self.batch)
        self._tokens = self._steps()

    def __iter__(self) -> Iterator[TokenIds]:
        return self._tokens

    def __next__(self) -> TokenIds:
        return next(self._tokens)

    @property
    def ended(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool ``[B]``: rows that came to a stop id, or were ended by :meth:`end`."""
        return self._ends.rows

    def end(self, row: int) -> None:
        """Ends a row: what comes for it from now on is its last id."""
        self._ends.end(row)

    def _steps(self) -> Iterator[TokenIds]:
        if self._max_new_tokens == 0:
            return
        times = self.times
        start = time.perf_counter()
        self._run.compile(steps=self._max_new_tokens > 1)
        compiled = time.perf_counter()
        times.compile_seconds = compiled - start
        made = self._run.prefill()
        ids = np.asarray(made[0])
        times.prefill_seconds = time.perf_counter() - compiled
        times.prefill_tokens = int(self._run.prompts.lengths.sum())
        yield self._ends.mask(ids)
        for _ in range(self._max_new_tokens - 1):
            if self._ends.rows.all():
                return
            start = time.perf_counter()
            made = self._run.step(*made)
            ids = np.asarray(made[0])
            times.decode_seconds += time.perf_counter() - start
            times.decode_tokens += ids.size
            yield self._ends.mask(ids)


def generate(model: Decoder, token_ids: PromptIds, request: Request) -> TokenIds:
    """As :meth:`jax_w4a8.models.decoder.Decoder.generate`, whose arguments and errors these are."""
    if request.stop_token_ids:
        stream = TokenStream(model, token_ids, request)
        return _columns(list(stream), stream.batch)
    run = _Run(model, check_prompts(token_ids, model.config.vocab_size), request)
    tokens: list[jax.Array] = []
    if request.max_new_tokens:
        made = run.prefill()
        tokens.append(made[0])
        for _ in range(request.max_new_tokens - 1):  # nothing waits for a token, so steps queue up
            made = run.step(*made)
            tokens.append(made[0])
    return _columns([np.asarray(token) for token in tokens], run.batch)


def _columns(tokens: list[TokenIds], batch: int) -> TokenIds:
    """int32 ``[B, N]`` of N times ``[B]``."""
    return np.stack(tokens, axis=1) if tokens else np.empty((batch, 0), np.int32)
