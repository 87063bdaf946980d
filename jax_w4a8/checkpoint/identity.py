"""What tells one state of a checkpoint from another without reading its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax_w4a8.checkpoint.tensors import TensorFiles

#: Of a file that doesn't say how long its header is, this much is taken for one.
_HEADER_BYTES = 1 << 20
_LONGEST_HEADER = 100 << 20


def source_identity(files: TensorFiles, others: Iterable[Path]) -> dict[str, Any]:
    """Sizes, times of change and hashed headers of a checkpoint's tensor files, and hashes of other files.

    Args:
      files: the tensors.
      others: files that say what the tensors mean, such as ``config.json``; absent ones are left out.

    Returns:
      Plain values for JSON, equal for the same state of the same files.
    """
    tensors = sorted({header.file for header in files.headers.values()})
    return {
        "tensors": {file.name: _describe(file) for file in tensors},
        "others": {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in others if file.exists()
        },
    }


def _describe(file: Path) -> dict[str, Any]:
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "header": _hash_header(file)}


def _hash_header(file: Path) -> str:
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        known = file.suffix == ".safetensors" and length <= _LONGEST_HEADER
        return hashlib.sha256(start + opened.read(length if known else _HEADER_BYTES)).hexdigest()
