"""A file of packed modules: written at once, mapped into memory to be read, checked before it is trusted.

It is a valid ``.safetensors`` file, so that other tools can look into it. Every tensor starts at a multiple
of 64 bytes (padding tensors lie between), so that JAX takes mapped arrays over without a copy. The last
tensor, ``sha256``, holds digests: of the header, then of every other tensor in the order of the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jax_w4a8.buffers import ALIGNMENT
from jax_w4a8.weights import LAYOUT_VERSION, ExpertWeights, LinearWeights

#: Changes with the form of the file; the layout of packed bytes has a version of its own.
FILE_VERSION = 1
_FORMAT = "jax_w4a8 packed modules"
_DTYPES = {
    "U8": np.dtype(np.uint8),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
#: Dataclasses that a module may be, beside arrays, tuples and None.
_TYPES = {cls.__name__: cls for cls in (LinearWeights, ExpertWeights)}
_DIGESTS = "sha256"
_DIGEST_BYTES = hashlib.sha256().digest_size
_PAGE = 4096
_CHUNK = 16 << 20
#: Temporary files of this age belong to nobody any more.
_ABANDONED_SECONDS = 24 * 3600

#: What a header raises that isn't of the form that this module writes.
_NO_SUCH_FILE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class UnusableFileError(Exception):
    """The file can't be used; the message says why."""


@dataclasses.dataclass(frozen=True)
class _Tensor:
    name: str
    array: np.ndarray[Any, Any]


def _padding(size: int, multiple: int) -> int:
    return -size % multiple


# ---------------------------------------------------------------------------------------------------------
# Modules as JSON: arrays by name, sizes as they are.


def _describe(name: str, value: Any, tensors: list[_Tensor]) -> Any:
    """What JSON says about ``value``; its arrays are appended to ``tensors``."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return [_describe(f"{name}.{i}", item, tensors) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _describe(f"{name}.{field.name}", getattr(value, field.name), tensors)
            for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, "fields": fields}
    tensors.append(_Tensor(name, np.asarray(value)))
    return name


def _restore(description: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(description, str):
        return arrays[description]
    if isinstance(description, list):
        return tuple(_restore(item, arrays) for item in description)
    if isinstance(description, dict):
        fields = {name: _restore(value, arrays) for name, value in description["fields"].items()}
        return _TYPES[description["type"]](**fields)
    return description


# ---------------------------------------------------------------------------------------------------------
# Writing.


def write_packed_file(path: Path, source: Mapping[str, Any], modules: Mapping[str, Any]) -> None:
    """Writes modules under another name, flushes them to the disk, and only then renames the file.

    A reader sees the file that was there before or the whole new one; of two writers the last one wins.

    Args:
      path: the file; its directory is made if it isn't there.
      source: what the modules were made from; :func:`read_packed_file` must be given the same.
      modules: by name; each an array (numpy or jax), packed weights, None, or a tuple of these.

    Raises:
      OSError: the directory can't be written to, or is full; nothing is left behind then.
    """
    tensors: list[_Tensor] = []
    described = {name: _describe(name, module, tensors) for name, module in modules.items()}
    header = _header(source, described, tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            _write(file, header, tensors)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _header(source: Mapping[str, Any], modules: Mapping[str, Any], tensors: list[_Tensor]) -> bytes:
    metadata = {
        "format": _FORMAT,
        "file_version": str(FILE_VERSION),
        "layout_version": str(LAYOUT_VERSION),
        "source": json.dumps(source, sort_keys=True),
        "modules": json.dumps(modules),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        nonlocal end
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes

    for number, tensor in enumerate(tensors):
        array = tensor.array
        add(tensor.name, _DTYPE_NAMES[array.dtype], array.shape, array.nbytes)
        filler = _padding(array.nbytes, ALIGNMENT)
        if filler:
            add(f"padding.{number}", "U8", (filler,), filler)
    digests = (1 + len(tensors), _DIGEST_BYTES)
    add(_DIGESTS, "U8", digests, math.prod(digests))
    text = json.dumps(header).encode()
    text += b" " * _padding(8 + len(text), _PAGE)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, header: bytes, tensors: list[_Tensor]) -> None:
    digests = [hashlib.sha256(header).digest()]
    file.write(header)
    for tensor in tensors:
        digest = hashlib.sha256()
        for piece in _pieces(tensor.array):
            file.write(piece)
            digest.update(piece)
        file.write(bytes(_padding(tensor.array.nbytes, ALIGNMENT)))
        digests.append(digest.digest())
    file.write(b"".join(digests))


def _pieces(array: np.ndarray[Any, Any]) -> Iterator[memoryview]:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    for start in range(0, len(raw), _CHUNK):
        yield raw[start : start + _CHUNK]


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files of writers that were killed."""
    for other in path.parent.glob(f"{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > _ABANDONED_SECONDS:
                other.unlink()


def _sync_directory(directory: Path) -> None:
    """Makes a rename in it last; not every system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------
# Reading.


def read_packed_file(path: Path, source: Mapping[str, Any], *, verify: bool = False) -> dict[str, Any]:
    """Maps a file of packed modules into memory.

    Args:
      path: the file.
      source: what the modules must have been made from.
      verify: read all of it and compare digests; otherwise only sizes, versions and the header are checked.

    Returns:
      Modules by name, as :func:`write_packed_file` was given them; read-only numpy arrays in mapped memory,
      which stays mapped for as long as one of them lives.

    Raises:
      FileNotFoundError: there is none.
      UnusableFileError: it is no such file, of another version or source, truncated, or damaged.
    """
    try:
        with path.open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"there is no {path}") from error
    except (OSError, ValueError) as error:  # an empty file can't be mapped
        raise UnusableFileError(f"it can't be mapped ({error})") from error
    try:
        header = _read_header(data)
        _check_metadata(header["__metadata__"], source)
        arrays = _map_arrays(data, header)
        if verify:
            _verify(arrays)
        described = json.loads(header["__metadata__"]["modules"])
        return {name: _restore(module, arrays) for name, module in described.items()}
    except _NO_SUCH_FILE as error:
        raise UnusableFileError("it is no file of packed modules") from error


def _read_header(data: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The parsed header, after its digest and the file's size were checked."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or 8 + length > len(data):
        raise UnusableFileError("it is truncated, or no such file")
    raw = data[: 8 + length].tobytes()
    header: dict[str, Any] = json.loads(raw[8:])
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    end = max(tensor["data_offsets"][1] for tensor in tensors)
    begin = header[_DIGESTS]["data_offsets"][0]
    if header["__metadata__"]["format"] != _FORMAT:
        raise UnusableFileError("it is no file of packed modules")
    if 8 + length + end != len(data):
        raise UnusableFileError(f"it has {len(data)} bytes where its header promises {8 + length + end}")
    stored = data[8 + length + begin :][:_DIGEST_BYTES].tobytes()
    if stored != hashlib.sha256(raw).digest():
        raise UnusableFileError("its header is damaged")
    return header


def _check_metadata(metadata: Mapping[str, str], source: Mapping[str, Any]) -> None:
    for field, version in (("file_version", FILE_VERSION), ("layout_version", LAYOUT_VERSION)):
        if metadata.get(field) != str(version):
            raise UnusableFileError(
                f"its {field.replace('_', ' ')} is {metadata.get(field)}, and this package has {version}"
            )
    if metadata.get("source") != json.dumps(source, sort_keys=True):
        raise UnusableFileError("the checkpoint has changed since it was made")


def _map_arrays(data: np.ndarray[Any, Any], header: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    first = 8 + int.from_bytes(data[:8].tobytes(), "little")
    arrays = {}
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            raw = data[first + begin : first + end]
            arrays[name] = raw.view(_DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return arrays


def _verify(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    names = [name for name in arrays if name != _DIGESTS and not name.startswith("padding.")]
    for name, expected in zip(names, itertools.islice(arrays[_DIGESTS], 1, None), strict=True):
        digest = hashlib.sha256()
        for piece in _pieces(arrays[name]):
            digest.update(piece)
        if digest.digest() != expected.tobytes():
            raise UnusableFileError(f"{name!r} is damaged")
