"""The one exception of this subpackage.

Whatever bytes a checkpoint's files hold, reading them succeeds or raises CheckpointError; beside it only
OSError and MemoryError, where the machine fails, and ImportError, where a package isn't installed.
``tests/fuzz`` holds the readers to that.
"""

from __future__ import annotations

import reprlib
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint is damaged or of an unsupported kind; the message names the file, tensor or field."""


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxdict = 30


def shortened(value: Any) -> str:
    """``repr`` of a value that a stranger's file holds, for a message: cut off where it is long or deep."""
    return _short.repr(value)
