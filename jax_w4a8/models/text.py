"""Text in, text out: a checkpoint's tokenizer around greedy generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.checkpoint.gguf_file import GGUF_SUFFIX
from jax_w4a8.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from jax_w4a8.models.decoder import Decoder
from jax_w4a8.models.generation import GenerationTimes

TOKENIZER_FILE = "tokenizer.json"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


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
    if not file.exists():
        raise CheckpointError(f"{file} is missing: text needs the model's tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # what tokenizers raises for any damage is a bare Exception
        raise CheckpointError(f"{file} can't be read as a tokenizer: {error}") from error


class TextStream:
    """An iterator over the pieces of a text, as a model makes them; it ends with the text.

    A piece may be more than one token: one that ends inside a character waits for the rest.

    Attributes:
      ids: the new tokens so far, an end-of-text id included.
    """

    def __init__(self, model: Decoder, tokenizer: Any, prompt: str, max_new_tokens: int) -> None:
        """Raises ValueError if the prompt has no tokens, or too many, or ones that the model doesn't know."""
        prompt_ids = tokenizer.encode(prompt).ids
        if not prompt_ids:
            raise ValueError("prompt must not be empty")
        self._tokenizer = tokenizer
        self._stream = model.stream(np.asarray([prompt_ids], np.int32), max_new_tokens)
        self.ids: list[int] = []
        self._pieces = self._decode()

    @property
    def times(self) -> GenerationTimes:
        """Where the time went so far."""
        return self._stream.times

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def _decode(self) -> Iterator[str]:
        done = ""
        for token in self._stream:
            self.ids.append(int(token[0]))
            text: str = self._tokenizer.decode(self.ids)
            if not text.endswith(_INCOMPLETE) and len(text) > len(done):
                yield text[len(done) :]
                done = text
        rest = self._tokenizer.decode(self.ids)[len(done) :] if self.ids else ""
        if rest:
            yield rest
