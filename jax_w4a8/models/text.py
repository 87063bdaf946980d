"""Text in, text out: a checkpoint's tokenizer around generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.checkpoint.gguf_file import GGUF_SUFFIX
from jax_w4a8.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from jax_w4a8.checkpoint.tokenizer_errors import tokenizer_errors
from jax_w4a8.models.decoder import GREEDY, Decoder
from jax_w4a8.models.detokenizer import Detokenizer, StopStrings
from jax_w4a8.models.generation import GenerationTimes, TokenStream
from jax_w4a8.models.prompts import DEFAULT_CHUNK
from jax_w4a8.models.sampling import Sampling

TOKENIZER_FILE = "tokenizer.json"


def load_tokenizer(path: str | Path) -> Any:
    """The ``tokenizers.Tokenizer`` of a checkpoint.

    Raises:
      ImportError: ``tokenizers`` isn't installed.
      CheckpointError: the directory has no ``tokenizer.json``, or it is damaged.
    """
    from tokenizers import Tokenizer

    directory = Path(path)
    if directory.suffix.lower() == GGUF_SUFFIX:
        return load_gguf_tokenizer(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    file = directory / TOKENIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: text needs the model's tokenizer")
    with tokenizer_errors(f"{file} can't be read as a tokenizer"):
        tokenizer = Tokenizer.from_file(str(file))
        # A file keeps what its writer set for batches; a prompt is neither cut off nor filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


class _Row:
    """The text of one row of a batch, in pieces."""

    def __init__(self, tokenizer: Any, stop_strings: str | Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop_strings)

    @property
    def ids(self) -> list[int]:
        return self._detokenizer.ids

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def add(self, token_id: int) -> str:
        return self._stops.add(self._detokenizer.add(token_id))

    def finish(self) -> str:
        return self._stops.add(self._detokenizer.finish()) + self._stops.finish()


class TextStream:
    """An iterator over the pieces of a text, as a model makes them; it ends with the text.

    A piece may be more than one token: one that ends inside a character, or in what may become a stop string,
    waits for the rest. The stop string itself is no part of the text.

    Attributes:
      ids: the new tokens so far, an end-of-text id included.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Any,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling = GREEDY,
        stop_strings: str | Sequence[str] = (),
        prefill_chunk: int = DEFAULT_CHUNK,
    ) -> None:
        """Takes a text, or its ids as a chat template's text has them, which already holds special tokens.

        Raises:
          TypeError, ValueError: as :meth:`Decoder.generate`; also for stop strings that are empty or none.
        """
        ids = encode(tokenizer, prompt)
        self._row = _Row(tokenizer, stop_strings)
        self._stream = model.stream([ids], max_new_tokens, sampling=sampling, prefill_chunk=prefill_chunk)
        self._pieces = self._decode()

    @property
    def ids(self) -> list[int]:
        """The new tokens so far, an end-of-text id included."""
        return self._row.ids

    @property
    def times(self) -> GenerationTimes:
        """Where the time went so far."""
        return self._stream.times

    @property
    def finish_reason(self) -> str:
        """``stop`` after an end-of-text id or a stop string, else ``length``."""
        return "stop" if self._row.stopped or bool(self._stream.ended[0]) else "length"

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _decode(self) -> Iterator[str]:
        for token in self._stream:
            piece = self._row.add(int(token[0]))
            if piece:
                yield piece
            if self._row.stopped:
                return
        rest = self._row.finish()
        if rest:
            yield rest


def generate_texts(
    model: Decoder,
    tokenizer: Any,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = 32,
    *,
    sampling: Sampling = GREEDY,
    stop_strings: str | Sequence[str] = (),
    prefill_chunk: int = DEFAULT_CHUNK,
) -> list[str]:
    """Continues several texts at once, each as it would be alone.

    Args:
      model: what continues them.
      tokenizer: the model's, as :func:`load_tokenizer` gives it.
      prompts: texts, or ids.
      max_new_tokens, sampling, prefill_chunk: as for :meth:`Decoder.generate`.
      stop_strings: a text ends before the first of these.

    Returns:
      What follows each prompt.

    Raises:
      As :class:`TextStream`.
    """
    stream = model.stream(
        [encode(tokenizer, prompt) for prompt in prompts],
        max_new_tokens,
        sampling=sampling,
        prefill_chunk=prefill_chunk,
    )
    rows = [_Row(tokenizer, stop_strings) for _ in prompts]
    texts = [""] * len(rows)
    for tokens, ended in _with_ends(stream):
        for number, row in enumerate(rows):
            if not ended[number]:
                texts[number] += row.add(int(tokens[number]))
                if row.stopped:
                    stream.end(number)
    return [text + ("" if row.stopped else row.finish()) for text, row in zip(texts, rows, strict=True)]


def _with_ends(stream: TokenStream) -> Iterator[tuple[Any, Any]]:
    """Each step's ids, and which rows had ended before it."""
    ended = stream.ended
    for tokens in stream:
        yield tokens, ended
        ended = stream.ended


def encode(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    """The ids of a prompt; ids stay as they are.

    Raises:
      ValueError: there are none, or the tokenizer fails (CheckpointError).
    """
    with tokenizer_errors("the tokenizer fails on the prompt"):
        ids = tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ValueError("prompt must not be empty")
    return ids
