"""How well a model predicts a text: perplexity by sliding window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_w4a8.models.decoder import Decoder
from jax_w4a8.models.prompts import SMALLEST_CHUNK, check_prompts

#: Windows of long-context models, unless another length is asked for.
DEFAULT_LENGTH = 2048
#: Positions whose logits are in memory at once.
_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """What a text cost a model.

    Attributes:
      nll: negative log-likelihood of the scored tokens together, in nats.
      tokens: how many were scored.
      text_bytes: length of the text in UTF-8; None if it wasn't given.
      max_length, stride: the windows.
    """

    nll: float
    tokens: int
    text_bytes: int | None
    max_length: int
    stride: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood per token."""
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the scored tokens took, per byte of the text: comparable between tokenizers."""
        return None if self.text_bytes is None else self.nll / math.log(2) / self.text_bytes


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [begin, end) of a text, of which those from ``first`` on are scored."""

    begin: int
    end: int
    first: int


def windows(tokens: int, max_length: int, stride: int) -> Iterator[Window]:
    """Windows that score each token once, but for those that begin one with nothing before them.

    They begin ``stride`` apart; the first scores all its tokens, each further one those that the windows
    before didn't reach, as in https://huggingface.co/docs/transformers/perplexity.
    """
    reached = 0
    for begin in range(0, tokens, stride):
        end = min(begin + max_length, tokens)
        yield Window(begin, end, max(reached, begin + 1))
        reached = end
        if end == tokens:
            return


def perplexity(
    model: Decoder,
    token_ids: ArrayLike,
    *,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 1,
    text_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of a text by sliding window.

    Each token is scored once, with at least ``max_length - stride`` tokens before it where there are so many.
    With ``stride == max_length`` windows don't overlap, and the first token of each has no context and isn't
    scored; otherwise that is so of the text's first token alone.

    Args:
      model: what predicts it.
      token_ids: the text, integers ``[T]``, at least 2.
      max_length: tokens per window; None for the model's positions or 2048, whichever is less.
      stride: tokens from one window to the next, at most ``max_length``; None for half of it.
      batch_size: windows at once. It changes the speed and no bit of the result.
      text_bytes: length of the text in UTF-8, for bits per byte.
      progress: called with tokens scored so far and tokens in all.

    Returns:
      The :class:`Perplexity`.

    Raises:
      TypeError, ValueError: an argument is out of range, or ids aren't integers of the vocabulary.
    """
    limit = model.config.max_positions
    max_length = min(limit, DEFAULT_LENGTH) if max_length is None else max_length
    if not 2 <= max_length <= limit:
        raise ValueError(f"max_length must be in [2, {limit}], the model's positions, got {max_length}")
    stride = max_length // 2 if stride is None else stride
    if not 1 <= stride <= max_length:
        raise ValueError(f"stride must be in [1, max_length = {max_length}], got {stride}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    ids = check_prompts([np.asarray(token_ids)], model.config.vocab_size).ids[0]
    if len(ids) < 2:
        raise ValueError(f"token_ids must hold at least 2 tokens, one to predict another, got {len(ids)}")
    todo = list(windows(len(ids), max_length, stride))
    total = sum(window.end - window.first for window in todo)
    width = -(-min(max_length, len(ids)) // SMALLEST_CHUNK) * SMALLEST_CHUNK
    nll, done = 0.0, 0
    for start in range(0, len(todo), batch_size):
        part = todo[start : start + batch_size]
        nll += _score(model, ids, part, batch_size, width)
        done += sum(window.end - window.first for window in part)
        if progress is not None:
            progress(done, total)
    return Perplexity(nll, total, text_bytes, max_length, stride)


def _score(
    model: Decoder, ids: np.ndarray[Any, np.dtype[np.int32]], part: list[Window], batch: int, width: int
) -> float:
    """Negative log-likelihood of what some windows score, summed in float64."""
    tokens = np.zeros((batch, width), np.int32)
    lengths = np.ones(batch, np.int32)
    scored = np.zeros((batch, width), bool)
    for row, window in enumerate(part):
        lengths[row] = window.end - window.begin
        tokens[row, : lengths[row]] = ids[window.begin : window.end]
        scored[row, window.first - window.begin : lengths[row]] = True
    nll = np.asarray(_token_nll(model, model.check_token_ids(tokens), lengths, scored), np.float64)
    return float(nll[scored].sum())


@jax.jit
def _token_nll(model: Decoder, ids: jax.Array, lengths: jax.Array, scored: jax.Array) -> jax.Array:
    """float32 ``[B, T]``: of each scored token, given those before it; 0 elsewhere."""
    batch, width = ids.shape
    hidden, _ = model.hidden_states(ids, model.empty_cache(batch, width), lengths)
    # The state before a token predicts it. Blocks of positions bound the memory that logits take.
    before = jnp.pad(hidden[:, :-1], ((0, 0), (1, -width % _BLOCK), (0, 0)))
    targets, wanted = (jnp.pad(a, ((0, 0), (0, -width % _BLOCK))) for a in (ids, scored))

    def block(index: jax.Array) -> jax.Array:
        states, goal, want = (
            lax.dynamic_slice_in_dim(a, index * _BLOCK, _BLOCK, 1) for a in (before, targets, wanted)
        )

        def score() -> jax.Array:
            logits = model.logits(states)
            chosen = jnp.take_along_axis(logits, goal[..., None], axis=-1)[..., 0]
            return jnp.where(want, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)

        return lax.cond(want.any(), score, lambda: jnp.zeros(goal.shape, jnp.float32))

    blocks = lax.map(block, jnp.arange(targets.shape[1] // _BLOCK))
    return blocks.swapaxes(0, 1).reshape(batch, -1)[:, :width]
