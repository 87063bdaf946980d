"""Prompts of unequal lengths, and how they are cut into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

TokenIds = np.ndarray[Any, np.dtype[np.int32]]

#: One prompt per row, of one length or of any.
PromptIds = ArrayLike | Sequence[ArrayLike | Sequence[int]]

#: Prompts, or what is left of them, are padded to a power of two from here on, so that programs are shared.
SMALLEST_CHUNK = 16
#: Tokens per row that go through the model at once.
DEFAULT_CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Checked prompts.

    Attributes:
      ids: int32 ``[B, L]``, padded with 0 on the right.
      lengths: int32 ``[B]``, each at least 1 and at most L.
    """

    ids: TokenIds
    lengths: TokenIds

    @property
    def longest(self) -> int:
        """L."""
        return self.ids.shape[1]

    def chunks(self, size: int) -> Iterator[Prompts]:
        """Parts of up to ``size`` tokens per row; a row that ended before has length 0."""
        for start in range(0, self.longest, size):
            part = self.ids[:, start : start + size]
            width = padded_length(part.shape[1], size)
            ids = np.pad(part, ((0, 0), (0, width - part.shape[1])))
            yield Prompts(ids, np.clip(self.lengths - start, 0, part.shape[1]))


def padded_length(tokens: int, size: int) -> int:
    """The length that a chunk of up to ``size`` tokens is padded to."""
    return min(max(SMALLEST_CHUNK, 1 << (tokens - 1).bit_length()), max(size, tokens))


def check_prompts(token_ids: PromptIds, vocab_size: int) -> Prompts:
    """Prompts of one length ``[B, T]``, or a list of B prompts of any lengths.

    Raises:
      TypeError, ValueError: ids aren't integers of such a shape, a prompt is empty, or an id lies outside the
        vocabulary.
    """
    rows = _rows(token_ids)
    if not rows:
        raise ValueError("token_ids must hold at least one prompt, got none")
    for number, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"token_ids must be prompts of shape [T], prompt {number} has shape {row.shape}")
        if row.size == 0:
            raise ValueError(f"token_ids must hold at least one token per row, got an empty prompt {number}")
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(f"token_ids must be integers, got {row.dtype}")
        lowest, highest = int(row.min()), int(row.max())
        if lowest < 0 or highest >= vocab_size:
            worst = lowest if lowest < 0 else highest
            raise ValueError(f"token_ids must lie in [0, {vocab_size}), found {worst}")
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.zeros((len(rows), int(lengths.max())), np.int32)
    for row, padded in zip(rows, ids, strict=True):
        padded[: len(row)] = row
    return Prompts(ids, lengths)


def _rows(token_ids: Any) -> list[np.ndarray[Any, np.dtype[Any]]]:
    if isinstance(token_ids, list | tuple) and all(_is_row(row) for row in token_ids):
        return [np.asarray(row) for row in token_ids]
    array = np.asarray(token_ids)
    if not np.issubdtype(array.dtype, np.integer) and array.size:
        raise TypeError(f"token_ids must be integers, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"token_ids must have shape [B, T], got {array.shape}")
    return list(array)


def _is_row(row: Any) -> bool:
    return isinstance(row, list | tuple | np.ndarray | jax.Array) and np.ndim(row) == 1
