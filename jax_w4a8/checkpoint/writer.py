"""Writes ``.safetensors`` files piece by piece, so that no tensor has to fit into memory.

The safetensors package writes a file from tensors that are all in memory; its format is simple enough to
stream: eight bytes with the length of a JSON header, the header, then the values.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from jax_w4a8.checkpoint.tensors import DTYPES

PARTIAL_SUFFIX = ".partial"
_ALIGNMENT = 8
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor to be written.

    Attributes:
      name: its name.
      shape: its shape.
      dtype: safetensors' name of its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


def _layout(tensors: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the values, and where in the file each tensor's values begin.

    Wide dtypes go first, so that all values are aligned, as the safetensors package orders them.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for spec in sorted(tensors, key=lambda spec: (-DTYPES[spec.dtype].itemsize, spec.name)):
        starts[spec.name] = end
        end += spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [starts[spec.name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    before = len(text).to_bytes(8, "little") + text
    return before, {name: len(before) + start for name, start in starts.items()}


class SafetensorsWriter:
    """A file that takes its name only when it is complete.

    Until :meth:`commit` it is called ``NAME.partial``; without it, nothing of that name is left.
    """

    def __init__(self, file: Path, tensors: Sequence[TensorSpec]) -> None:
        """Opens the file and writes its header."""
        self._file = file
        self._specs = {spec.name: spec for spec in tensors}
        self._written = dict.fromkeys(self._specs, 0)
        self._partial = partial_path(file)
        before, self._starts = _layout(tensors)
        self._handle = self._partial.open("wb", buffering=0)
        try:
            self._put(before)
        except BaseException:
            self._drop()
            raise

    def write(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """Writes the next values of a tensor, in row-major order.

        Raises:
          ValueError: another dtype than promised, or too many values.
        """
        spec = self._specs[name]
        values = np.asarray(values, order="C")
        if _NAMES.get(values.dtype) != spec.dtype:
            raise ValueError(f"tensor {name!r} must be {spec.dtype}, got {values.dtype}")
        if self._written[name] + values.nbytes > spec.nbytes:
            raise ValueError(f"tensor {name!r} {spec.shape} gets more values than it has")
        self._handle.seek(self._starts[name] + self._written[name])
        self._put(values.reshape(-1).view(np.uint8).data)
        self._written[name] += values.nbytes

    def commit(self) -> None:
        """Gives the file its name.

        Raises:
          ValueError: a tensor isn't complete.
        """
        short = [name for name, spec in self._specs.items() if self._written[name] != spec.nbytes]
        if short:
            raise ValueError(f"tensors {short} are not complete")
        _flush(self._handle)
        self._handle.close()
        _rename(self._partial, self._file)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def _put(self, content: bytes | memoryview) -> None:
        """Writes all of it; a disk that is full takes a part first, and fails at the next."""
        rest = memoryview(content)
        while len(rest):
            rest = rest[self._handle.write(rest) :]

    def _drop(self) -> None:
        self._handle.close()
        self._partial.unlink(missing_ok=True)


def partial_path(file: Path) -> Path:
    """What ``file`` is called until it is complete."""
    return file.with_name(file.name + PARTIAL_SUFFIX)


def write_whole(file: Path, content: bytes) -> None:
    """Writes a small file that is there either whole or not at all, whatever happens."""
    with _partial_file(file) as handle:
        handle.write(content)


def copy_whole(source: Path, destination: Path) -> None:
    """Copies a file; the copy is there either whole or not at all."""
    with source.open("rb") as reader, _partial_file(destination) as handle:
        while block := reader.read(1 << 20):
            handle.write(block)


@contextlib.contextmanager
def _partial_file(file: Path) -> Iterator[Any]:
    partial = partial_path(file)
    try:
        with partial.open("wb") as handle:
            yield handle
            _flush(handle)
        _rename(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _flush(handle: Any) -> None:
    handle.flush()
    os.fsync(handle.fileno())


def _rename(partial: Path, file: Path) -> None:
    partial.replace(file)
    directory = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
