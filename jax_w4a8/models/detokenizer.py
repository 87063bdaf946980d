"""From ids to text as they come: nothing is given out that a later id could still change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What decoders put in the place of bytes that are no character, or not yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes ids one by one; a character whose bytes are several tokens waits for the last of them.

    Each id is decoded behind those before it, back to the last piece, because decoders treat a text's first
    token in their own way.

    Attributes:
      ids: those so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._context = 0
        self._given = 0

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` completes, maybe empty."""
        self.ids.append(token_id)
        return self._piece(final=False)

    def finish(self) -> str:
        """What still waits; bytes that never became a character give replacement characters."""
        return self._piece(final=True)

    def _piece(self, final: bool) -> str:
        before: str = self._tokenizer.decode(self.ids[self._context : self._given])
        text: str = self._tokenizer.decode(self.ids[self._context :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._context, self._given = self._given, len(self.ids)
        return text[len(before) :]


class StopStrings:
    """Cuts a text before the first of some strings; text that may turn out to begin one is held back.

    Attributes:
      found: whether one came.
    """

    def __init__(self, strings: str | Sequence[str]) -> None:
        """Raises TypeError or ValueError unless ``strings`` are strings of at least one character."""
        self.found = False
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        self._held = ""
        for string in self._strings:
            if not isinstance(string, str):
                raise TypeError(f"stop_strings must be strings, got {string!r}")
            if not string:
                raise ValueError("stop_strings must not be empty, got ''")

    def add(self, text: str) -> str:
        """The part of the text so far that is new and sure."""
        if self.found:
            return ""
        text = self._held + text
        ends = [place for string in self._strings if (place := text.find(string)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        sure = len(text) - self._possible(text)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins one of the strings."""
        longest = min(len(text), max(map(len, self._strings), default=0))
        return next((n for n in range(longest, 0, -1) if self._begins_one(text[-n:])), 0)

    def _begins_one(self, end: str) -> bool:
        return any(string.startswith(end) for string in self._strings)
