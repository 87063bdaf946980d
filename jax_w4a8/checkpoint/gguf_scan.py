"""Whether a GGUF file's header can be true, before anything is made of it.

The ``gguf`` package believes the counts and lengths that a file states: a wrong one lets it run for ever, or
take all memory. Here every one of them is held against the file's size first. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from jax_w4a8.checkpoint.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Bytes of a value by its type's number; strings and arrays have lengths of their own.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
#: ggml's tensors have up to so many axes.
_MOST_AXES = 4
#: Of a name's length, a key's type and a value; of a tensor's name, axes, type and offset.
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_LARGEST_AXIS = 2**40


def check_gguf(path: Path) -> None:
    """Raises CheckpointError if ``path`` is no GGUF file, or its counts and lengths don't fit into it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, or not a file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Scan(data).run()
    except (OSError, ValueError, struct.error) as error:  # an empty file can't be mapped
        raise CheckpointError(f"{path} is not a complete GGUF file, or it is damaged: {error}") from error


class _Scan:
    """Walks through a header; every step stays inside the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def run(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ValueError("it doesn't begin with 'GGUF'")
        self._skip(4, "magic")
        version = self._number("<I", "version")
        if version & 0xFFFF == 0:
            raise ValueError("it is a big-endian file, which isn't supported")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, and {_VERSIONS} can be read")
        tensors, keys = self._number("<Q", "tensor count"), self._number("<Q", "key count")
        self._fits(tensors, _LEAST_TENSOR, "tensors")
        self._fits(keys, _LEAST_KEY, "keys")
        for number in range(keys):
            key = self._string(f"key {number}")
            self._value(self._number("<I", key), key)
        for number in range(tensors):
            self._tensor(self._string(f"the name of tensor {number}"))

    def _tensor(self, name: str) -> None:
        what = f"tensor {name!r}"
        axes = self._number("<I", what)
        if not 1 <= axes <= _MOST_AXES:
            raise ValueError(f"{what} has {axes} axes")
        shape = [self._number("<Q", what) for _ in range(axes)]
        if not all(1 <= size <= _LARGEST_AXIS for size in shape):
            raise ValueError(f"{what} has the shape {shape}")
        self._skip(4, what)
        offset = self._number("<Q", what)
        if offset > len(self._data):
            raise ValueError(f"{what} begins at {offset}, and the file has {len(self._data)} bytes")

    def _value(self, kind: int, key: str) -> None:
        if kind == _STRING:
            self._string(key)
        elif kind == _ARRAY:
            item, count = self._number("<I", key), self._number("<Q", key)
            if item == _STRING:
                self._fits(count, 8, key)
                for _ in range(count):
                    self._string(key)
            elif item in _SIZES:
                self._skip(count * _SIZES[item], key)
            else:
                raise ValueError(f"{key} is an array of type {item}, which isn't known")
        elif kind in _SIZES:
            self._skip(_SIZES[kind], key)
        else:
            raise ValueError(f"{key} is of type {kind}, which isn't known")

    def _string(self, what: str) -> str:
        length = self._number("<Q", what)
        start = self._at
        self._skip(length, what)
        return self._data[start : start + min(length, 200)].decode("utf-8", "replace")

    def _number(self, form: str, what: str) -> int:
        start = self._at
        self._skip(struct.calcsize(form), what)
        (value,) = struct.unpack_from(form, self._data, start)
        return int(value)

    def _skip(self, nbytes: int, what: str) -> None:
        if nbytes > len(self._data) - self._at:
            raise ValueError(f"{what} reaches beyond the file's end")
        self._at += nbytes

    def _fits(self, count: int, least: int, what: str) -> None:
        if count * least > len(self._data) - self._at:
            raise ValueError(f"{count} {what} don't fit into {len(self._data)} bytes")
