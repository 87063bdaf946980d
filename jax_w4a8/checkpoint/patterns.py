"""Regular expressions that come with a checkpoint: only such as can't take forever to match a name.

Python's engine tries every way to split a name among repetitions. Repetitions of single characters cost a
power of the name's length; a group that is repeated can cost as much as two to that length, so none is taken.
"""

from __future__ import annotations

import re

from jax_w4a8.checkpoint.errors import CheckpointError

#: Longer ones, or ones of more repetitions, are refused; those of Hugging Face tools have up to four.
_MOST_CHARACTERS = 1000
_MOST_REPETITIONS = 8
#: An escaped character, a class, a quantifier, a group's end with what follows, or anything else.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(\)[*+{])|([*+]|\{\d*,\d*\})|.", re.DOTALL)


def check_pattern(pattern: str, where: str) -> None:
    """Raises CheckpointError unless ``pattern`` is an expression that is soon matched; ``where`` names it."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where} holds {pattern[:80]!r}, not a regular expression: {error}") from error
    found = list(_TOKEN.finditer(pattern))
    if any(token[1] for token in found):
        reason = "repeats a group"
    elif sum(token[2] is not None for token in found) > _MOST_REPETITIONS:
        reason = f"has more than {_MOST_REPETITIONS} repetitions"
    elif len(pattern) > _MOST_CHARACTERS:
        reason = f"is longer than {_MOST_CHARACTERS} characters"
    else:
        return
    raise CheckpointError(f"{where} holds {pattern[:80]!r}, which {reason}: matching it could take forever")
