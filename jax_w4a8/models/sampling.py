"""How the next token is chosen from logits, by the names and in the order of Hugging Face's ``generate``."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_w4a8.invariance import evenly, ordered_sum, rounded

_TINY = float(np.finfo(np.float32).tiny)
#: Parts whose maxima are found side by side.
_PARTS = 64


def likeliest(logits: jax.Array) -> jax.Array:
    """``jnp.argmax`` of float32 ``[B, V]`` as int32 ``[B]``: the lowest id among equals, the first NaN.

    XLA's takes numbers one by one on one thread; maxima and minima of columns run in vectors.
    """
    size = logits.shape[-1]
    padded = jnp.pad(logits, ((0, 0), (0, -size % _PARTS)), constant_values=-jnp.inf)
    parts = padded.reshape(len(logits), _PARTS, -1)
    highest = parts.max(axis=1).max(axis=-1)[:, None, None]
    found = (parts == highest) | jnp.isnan(parts)
    ids = lax.broadcasted_iota(jnp.int32, parts.shape, 1) * parts.shape[2]
    ids += lax.broadcasted_iota(jnp.int32, parts.shape, 2)
    return jnp.where(found, ids, size).min(axis=1).min(axis=-1)


def _require_integer(name: str, value: object, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}")


def _require_number(name: str, value: object, low: float, high: float, ends: str) -> None:
    """Raises unless ``value`` lies in the interval; ``ends`` holds its brackets, such as ``(]``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    above = number > low or (number == low and ends[0] == "[")
    below = number < high or (number == high and ends[1] == "]")
    if not (above and below):
        raise ValueError(f"{name} must be in {ends[0]}{low:g}, {high:g}{ends[1]}, got {value}")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each next token is chosen.

    The repetition penalty comes first, then, if sampling, temperature, top-k, top-p and min-p in this order.

    Attributes:
      do_sample: draw a token by its probability; otherwise take the likeliest, the lowest id among equals.
      temperature: divides the logits, above 0.
      top_k: keep that many likeliest tokens; 0 keeps all.
      top_p: of these keep the fewest likeliest whose probabilities sum to at least this, in (0, 1].
      min_p: of these keep those with at least this share of the likeliest one's probability, in [0, 1].
      repetition_penalty: divides positive and multiplies negative logits of the tokens in the prompt and of
        those made so far, above 0; 1 changes nothing (Keskar et al., 2019).
      seed: row b of a batch draws from a random sequence of its own, that of ``seed + b``; or one seed per
        row. So a row's text depends on its prompt and its seed alone.

    Raises:
      TypeError, ValueError: on construction, naming the attribute.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if not isinstance(self.do_sample, bool):
            raise TypeError(f"do_sample must be True or False, got {self.do_sample!r}")
        _require_number("temperature", self.temperature, 0, math.inf, "()")
        _require_integer("top_k", self.top_k, 0)
        _require_number("top_p", self.top_p, 0, 1, "(]")
        _require_number("min_p", self.min_p, 0, 1, "[]")
        _require_number("repetition_penalty", self.repetition_penalty, 0, math.inf, "()")
        if isinstance(self.seed, Sequence) and not isinstance(self.seed, str):
            object.__setattr__(self, "seed", tuple(self.seed))
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            _require_integer("seed", seed, 0)

    def seeds(self, batch: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """uint32 ``[B]``, each row's seed (modulo 2^32).

        Raises:
          ValueError: ``seed`` has another number of rows.
        """
        seed = self.seed
        values = list(seed) if isinstance(seed, tuple) else [seed + row for row in range(batch)]
        if len(values) != batch:
            raise ValueError(f"seed must be an integer or one per row, {batch}, got {len(values)}")
        return np.array([value % 2**32 for value in values], np.uint32)

    @property
    def rules(self) -> Rules:
        """What of it decides the program."""
        return Rules(self.do_sample, int(self.top_k), self.top_p < 1, self.repetition_penalty != 1)

    @property
    def numbers(self) -> Numbers:
        """What of it a program takes as arguments."""
        return Numbers(
            np.float32(1 / self.temperature),
            np.float32(self.top_p),
            np.float32(self.min_p),
            np.float32(self.repetition_penalty),
        )


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which steps a program has; static under ``jit``."""

    do_sample: bool
    top_k: int
    uses_top_p: bool
    uses_penalty: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Numbers:
    """Parameters of the steps, float32 scalars."""

    inverse_temperature: jax.Array | np.float32
    top_p: jax.Array | np.float32
    min_p: jax.Array | np.float32
    repetition_penalty: jax.Array | np.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """What the choice of a row's next token depends on beside its logits.

    Attributes:
      seeds: uint32 ``[B]``.
      step: int32 scalar, tokens chosen so far.
      seen: bool ``[B, V]``, tokens of prompt and text; None without a repetition penalty.
    """

    seeds: jax.Array
    step: jax.Array
    seen: jax.Array | None


def start_sampler(
    rules: Rules, seeds: jax.Array, prompts: jax.Array, lengths: jax.Array, vocab_size: int
) -> SamplerState:
    """The state before the first token.

    Args:
      rules: which steps there are.
      seeds: uint32 ``[B]``.
      prompts: int32 ``[B, L]``, padded on the right.
      lengths: int32 ``[B]``, of the prompts.
      vocab_size: V.
    """
    seen = None
    if rules.uses_penalty:
        rows = jnp.arange(len(prompts))[:, None]
        inside = jnp.arange(prompts.shape[1]) < lengths[:, None]
        seen = jnp.zeros((len(prompts), vocab_size), bool)
        seen = seen.at[rows, jnp.where(inside, prompts, vocab_size)].set(True, mode="drop")
    return SamplerState(seeds, jnp.int32(0), seen)


def choose(
    logits: jax.Array, state: SamplerState, rules: Rules, values: Numbers
) -> tuple[jax.Array, SamplerState]:
    """The next token of each row, int32 ``[B]``, of float32 logits ``[B, V]``, and the state after it."""
    if state.seen is not None:
        penalty = values.repetition_penalty
        penalised = jnp.where(logits < 0, logits * penalty, logits * (1 / penalty))
        logits = jnp.where(state.seen, penalised, logits)
    if rules.do_sample:
        token = _draw(rounded(logits * values.inverse_temperature), state, rules, values)
    else:
        token = likeliest(logits)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    return token, SamplerState(state.seeds, state.step + 1, seen)


def _draw(scores: jax.Array, state: SamplerState, rules: Rules, values: Numbers) -> jax.Array:
    """A token by the probabilities that ``scores`` are logarithms of, by the Gumbel-max trick."""
    size = scores.shape[-1]
    ids = None
    if 0 < rules.top_k < size or rules.uses_top_p:
        scores, ids = lax.top_k(scores, min(rules.top_k or size, size))
    weights = evenly(jnp.exp, scores - scores.max(axis=-1, keepdims=True))
    keep = weights >= values.min_p
    if rules.uses_top_p:
        before = jnp.pad(jnp.cumsum(weights, axis=-1)[..., :-1], ((0, 0), (1, 0)))
        keep &= before < values.top_p * ordered_sum(weights)
    noisy = scores + _gumbel(state.seeds, state.step, scores.shape[-1])
    chosen = jnp.argmax(jnp.where(keep, noisy, -jnp.inf), axis=-1)
    if ids is not None:
        chosen = jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0]
    return chosen.astype(jnp.int32)


def _gumbel(seeds: jax.Array, step: jax.Array, size: int) -> jax.Array:
    """float32 ``[B, size]``, each row from its own seed."""

    @functools.partial(jax.vmap, in_axes=(0, None))
    def uniform(seed: jax.Array, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.random.uniform(key, (size,), minval=_TINY)

    negative = evenly(lambda u: -jnp.log(u), uniform(seeds, step))
    return evenly(lambda u: -jnp.log(jnp.maximum(u, _TINY)), negative)
