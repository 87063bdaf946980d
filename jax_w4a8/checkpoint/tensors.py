"""The tensors of a checkpoint directory: one ``.safetensors`` file or many, read one tensor at a time.

A *view* is a tensor that no file holds as such, made from others when it is read: one expert of a fused
tensor, the codes of a GGUF block. Whoever reads it doesn't see the difference.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_w4a8.buffers import aligned_empty
from jax_w4a8.checkpoint.errors import CheckpointError, shortened

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: safetensors' names of the dtypes that this package reads.
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
#: A file is mapped into memory while it is open, and what was read of it counts as memory of this process;
#: after so many bytes it is opened anew.
_REOPEN_BYTES = 32 << 20
#: Rows of a large tensor are read in pieces of about this many bytes.
_PIECE_BYTES = 16 << 20
#: The largest index or configuration that is read; the safetensors package draws the same line for headers.
_LARGEST_JSON = 100_000_000


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """What a file says about a tensor before it is read.

    Attributes:
      file: the file that holds it.
      shape: its shape.
      dtype: safetensors' name of its dtype, such as ``BF16``.
      stored_bytes: bytes that a view stands for in its file; None for a tensor that is stored as it is read.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    stored_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file; dtypes that this package doesn't read count as 0."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        itemsize = DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0
        return math.prod(self.shape) * itemsize


class TensorFiles:
    """All tensors of a checkpoint directory by name; only one file is open at a time.

    Attributes:
      headers: every tensor's header, in the order of the files.
      modules: the names of every module's own tensors.
    """

    def __init__(self, directory: Path, *, only_views: bool = False) -> None:
        """Reads the headers of all files.

        Args:
          directory: where they are.
          only_views: read none; all tensors will be views.

        Raises:
          CheckpointError: no file, a missing, short or damaged one, an index that doesn't fit the files, or
            the same tensor in two files.
        """
        self.directory = directory
        self.headers: dict[str, TensorHeader] = {}
        self.modules: dict[str, list[str]] = {}
        self._views: dict[str, Callable[[], Iterator[np.ndarray[Any, Any]]]] = {}
        self._open_file: Path | None = None
        self._handle: Any = None
        self._bytes_read = 0
        for file, promised in ({} if only_views else _find_files(directory)).items():
            self._add_file(file, promised)
        self.close()

    def close(self) -> None:
        """Closes the open file; reading opens it again."""
        self._handle = None
        self._open_file = None
        self._bytes_read = 0

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """The tensor ``name``, in memory of its own that starts at a multiple of 64 bytes.

        Raises:
          CheckpointError: the file changed or can't be read.
        """
        header = self.headers[name]
        out = aligned_empty(header.shape, DTYPES[header.dtype])
        if name in self._views:
            _fill(out, self._views[name]())
        elif out.ndim == 0 or header.nbytes <= _PIECE_BYTES:
            out[...] = self._read_piece(name, None)
        else:
            for rows in _row_pieces(header):
                out[rows] = self._read_piece(name, rows)
        return out

    def pieces(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor ``name`` (at least one axis) in pieces of consecutive rows, each about 16 MB."""
        if name in self._views:
            yield from self._views[name]()
            return
        for rows in _row_pieces(self.headers[name]):
            yield self._read_piece(name, rows)

    def read_part(self, name: str, *parts: slice) -> np.ndarray[Any, Any]:
        """Ranges (step 1) of the leading axes of a stored tensor ``name``; only they are read."""
        return self._read_piece(name, parts)

    def add_view(
        self, name: str, header: TensorHeader, read: Callable[[], Iterator[np.ndarray[Any, Any]]]
    ) -> None:
        """Adds a tensor that is made when it is read.

        Args:
          name: what it is called from now on.
          header: its file, shape, dtype and bytes.
          read: makes its values, consecutive rows at a time.

        Raises:
          CheckpointError: a file holds a tensor of that name.
        """
        if name in self.headers:
            raise CheckpointError(
                f"{self.headers[name].file}: tensor {name!r} is stored twice: as it is, fused"
            )
        self.headers[name] = header
        self.modules.setdefault(name.rpartition(".")[0], []).append(name)
        self._views[name] = read

    def _read_piece(self, name: str, part: slice | tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        header = self.headers[name]
        handle = self._handle_of(header.file)
        try:
            piece = handle.get_tensor(name) if part is None else handle.get_slice(name)[part]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{header.file}: can't read tensor {name!r}: {error}") from error
        self._bytes_read += piece.nbytes
        return np.asarray(piece)

    def _handle_of(self, file: Path) -> Any:
        if file != self._open_file or self._bytes_read > _REOPEN_BYTES:
            self.close()
            self._handle = _open(file)
            self._open_file = file
        return self._handle

    def _add_file(self, file: Path, promised: frozenset[str] | None) -> None:
        handle = self._handle_of(file)
        names = list(handle.keys())
        if promised is not None:
            _check_index(file, promised, names)
        for name in names:
            if name in self.headers:
                raise CheckpointError(
                    f"tensor {name!r} is in two files: {self.headers[name].file} and {file}"
                )
            part = handle.get_slice(name)
            self.headers[name] = TensorHeader(file, tuple(part.get_shape()), part.get_dtype())
            self.modules.setdefault(name.rpartition(".")[0], []).append(name)


def _fill(out: np.ndarray[Any, Any], pieces: Iterator[np.ndarray[Any, Any]]) -> None:
    row = 0
    for piece in pieces:
        out[row : row + len(piece)] = piece
        row += len(piece)


def _row_pieces(header: TensorHeader) -> Iterator[slice]:
    rows = header.shape[0]
    step = max(1, _PIECE_BYTES * rows // max(1, header.nbytes))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _open(file: Path) -> Any:
    if not _is_file(file):  # a pipe would be waited for
        raise CheckpointError(f"{file} is missing, or not a regular file")
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a complete safetensors file, or it is damaged: {error}"
        ) from error


def _find_files(directory: Path) -> dict[Path, frozenset[str] | None]:
    """The files to read, each with the tensors that an index promises, or None without an index."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    present = sorted(directory.glob("*.safetensors"))
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    files: dict[Path, frozenset[str] | None]
    if os.path.lexists(single):  # goes before an index, as in Hugging Face tools
        files = {single: None}
    elif index.exists():
        files = dict(_read_index(index))
    else:
        files = dict.fromkeys(present)
    if not files:
        raise CheckpointError(f"{directory} holds no .safetensors file")
    for file in present:
        if file not in files:
            logger.warning("%s is not part of the checkpoint and ignored", file)
    return files


def _read_index(index: Path) -> dict[Path, frozenset[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be a non-empty JSON object")
    shards: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        shards.setdefault(_shard_path(index, tensor, shard), set()).add(tensor)
    for shard, tensors in shards.items():
        if not _is_file(shard):
            raise CheckpointError(
                f"{shard} is missing: {index.name} names it for {len(tensors)} tensors, "
                f"such as {min(tensors)!r}"
            )
    return {shard: frozenset(tensors) for shard, tensors in shards.items()}


def _shard_path(index: Path, tensor: str, shard: Any) -> Path:
    if not isinstance(shard, str) or not shard:
        raise CheckpointError(f"{index}: shard of {tensor!r} must be a file name, got {shortened(shard)}")
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            raise CheckpointError(
                f"{index}: shard {shard!r} of {tensor!r} lies outside the checkpoint's directory"
            )
    return index.parent / shard


def _is_file(path: Path) -> bool:
    """False also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _check_index(file: Path, promised: frozenset[str], present: list[str]) -> None:
    missing = sorted(promised.difference(present))
    if missing:
        raise CheckpointError(
            f"{file} lacks {len(missing)} tensors that {INDEX_FILE} places there: {first_names(missing)}"
        )
    extra = sorted(set(present) - promised)
    if extra:
        raise CheckpointError(
            f"{file} holds {len(extra)} tensors that {INDEX_FILE} doesn't name: {first_names(extra)}"
        )


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names stand once, or with equal values; readers differ in which of several counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        for name, given in pairs:
            if given != value[name]:
                raise ValueError(f"{shortened(name)} is there twice, with different values")
    return value


def first_names(names: list[str], limit: int = 10) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
      CheckpointError: the file is missing, no regular file, too large, isn't JSON, holds something other than
        an object, or gives one name two values.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing" if not file.exists() else f"{file} is not a regular file")
    if file.stat().st_size > _LARGEST_JSON:
        raise CheckpointError(f"{file} is larger than any JSON of a model ({_LARGEST_JSON >> 20} MiB)")
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unambiguous)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value
