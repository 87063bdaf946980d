"""What the ``tokenizers`` package raises about a damaged tokenizer, as this package's own error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax_w4a8.checkpoint.errors import CheckpointError


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Raises CheckpointError, beginning with ``what``, for any error of the package.

    It raises bare exceptions, and where its Rust code panics one that isn't an Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {error}") from error
