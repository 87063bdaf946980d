"""The one exception of this subpackage."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is damaged or of an unsupported kind; the message names the file, tensor or field."""
