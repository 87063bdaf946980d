"""A GGUF file, presented as a checkpoint directory: its metadata as ``config.json``, its tensors as modules.

Q4_0 is this package's own scheme in other bytes: blocks of 32 inputs, each a float16 scale and 32 codes plus
8, the first 16 in the low nibbles. So its codes and scales are taken as they are, and nothing is rounded.
Q8_0 and the floating point types run in floating point, and so do embedding and output head, whatever type
they have. Everything in a decoder layer that is of another type is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError, shortened
from jax_w4a8.checkpoint.gguf_names import (
    Placement,
    architecture,
    configuration,
    place,
)
from jax_w4a8.checkpoint.gguf_scan import check_gguf
from jax_w4a8.checkpoint.scheme import QuantizationConfig, Scheme
from jax_w4a8.checkpoint.source import Source
from jax_w4a8.checkpoint.tensors import DTYPES, TensorFiles, TensorHeader

GGUF_SUFFIX = ".gguf"
_FLOAT_TYPES = ("F32", "F16", "BF16")
_BLOCK = 32
_SCHEME = Scheme("Q4_0", _BLOCK)
#: Tensors are read in pieces of rows of about this many bytes.
_PIECE_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: ``shape`` is numpy's, outermost axis first."""

    file: Path
    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a run along the innermost axis."""
        return self.nbytes // int(np.prod(self.shape[:-1], dtype=np.int64))

    def read(self, start: int, rows: int) -> np.ndarray[Any, Any]:
        """Raw bytes ``[rows, row_bytes]``, all axes but the innermost taken as one."""
        with self.file.open("rb") as handle:
            handle.seek(self.offset + start * self.row_bytes)
            raw = np.fromfile(handle, np.uint8, rows * self.row_bytes)
        if raw.size != rows * self.row_bytes:
            raise CheckpointError(f"{self.file}: tensor {self.name!r} is cut off")
        return raw.reshape(rows, self.row_bytes)


@dataclasses.dataclass(frozen=True)
class _ByModule(QuantizationConfig):
    """Modules of Q4_0 tensors; all others are in floating point."""

    modules: frozenset[str] = frozenset()

    def scheme_for(self, module: str, class_name: str = "Linear") -> Scheme | None:
        return _SCHEME if class_name == "Linear" and module in self.modules else None


def open_gguf(path: Path) -> Source:
    """Reads metadata and tensor headers of a GGUF file.

    Raises:
      ImportError: the ``gguf`` package isn't installed.
      CheckpointError: the file is missing, damaged, of an unsupported architecture, or holds a tensor of an
        unsupported type.
    """
    metadata, tensors = read_gguf(path)
    config = configuration(path, metadata, {t.name: t.shape for t in tensors}, _rope_factors(tensors))
    files = TensorFiles(path, only_views=True)
    quantized = set()
    for stored in tensors:
        for placement in place(stored.name, stored.shape, config):
            if _add(files, stored, placement):
                quantized.add(placement.module)
    config_of_modules = _ByModule((), (), frozenset(quantized))
    return Source(f"{path}: metadata", config, config_of_modules, files)


def read_gguf(path: Path) -> tuple[dict[str, Any], list[_Stored]]:
    """Metadata by key and headers of all tensors.

    Raises:
      ImportError, CheckpointError: as :func:`open_gguf`.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(f"{error}; GGUF files need it: pip install 'jax_w4a8[gguf]'") from error
    check_gguf(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = [
            _Stored(
                path,
                tensor.name,
                tensor.tensor_type.name,
                tuple(int(size) for size in reversed(tensor.shape)),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        ]
    except (ValueError, IndexError, KeyError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is not a complete GGUF file, or it is damaged: {error}") from error
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(f"{path} is one of {shortened(parts)} parts: join them with gguf-split first")
    architecture(path, metadata)
    return metadata, tensors


def _rope_factors(tensors: list[_Stored]) -> np.ndarray[Any, Any] | None:
    for stored in tensors:
        if stored.name == "rope_freqs.weight" and stored.type_name == "F32":
            return stored.read(0, 1)[0].view("<f4")
    return None


def _add(files: TensorFiles, stored: _Stored, placement: Placement) -> bool:
    """Adds the tensors of a module; whether it is quantised."""
    shape = placement.shape
    size = int(np.prod(shape[:-1], dtype=np.int64))
    nbytes = size * stored.row_bytes

    def add(suffix: str, shape: tuple[int, ...], dtype: str, part: str, share: int) -> None:
        name = f"{placement.module}.{suffix}"
        header = TensorHeader(stored.file, shape, dtype, share)
        files.add_view(name, header, lambda: _pieces(stored, placement, part))

    if stored.type_name == "Q4_0" and not placement.dequantized:
        scale_bytes = size * shape[-1] // _BLOCK * 2
        add("weight", shape, "I8", "codes", nbytes - scale_bytes)
        add("weight_scale", (*shape[:-1], shape[-1] // _BLOCK), "F16", "scale", scale_bytes)
        return True
    if stored.type_name not in _FLOAT_TYPES and stored.type_name != "Q8_0" and not placement.dequantized:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name!r} is {stored.type_name}; tensors of decoder layers must be "
            f"Q4_0, Q8_0 or {', '.join(_FLOAT_TYPES)} (llama-quantize --pure ... Q4_0 makes such a file)"
        )
    dtype = stored.type_name if stored.type_name in _FLOAT_TYPES else "F32"
    add(placement.suffix, shape, dtype, "float", nbytes)
    return False


def _pieces(stored: _Stored, placement: Placement, part: str) -> Iterator[np.ndarray[Any, Any]]:
    rows = int(np.prod(placement.shape[:-1], dtype=np.int64))
    step = rows if placement.rows is not None else max(1, _PIECE_BYTES // stored.row_bytes)
    for start in range(0, rows, step):
        raw = stored.read(placement.start + start, min(step, rows - start))
        values = _DECODERS[part](raw, stored)
        if len(placement.shape) == 1:
            values = values[0]
        yield values if placement.rows is None else values[placement.rows]


def _codes(raw: np.ndarray[Any, Any], stored: _Stored) -> np.ndarray[Any, Any]:
    """int8 ``[rows, K]``; a block's low nibbles are its first half."""
    nibbles = raw.reshape(len(raw), -1, 18)[..., 2:]
    codes = np.stack([nibbles & np.uint8(15), nibbles >> np.uint8(4)], axis=-2).view(np.int8)
    codes -= 8
    return codes.reshape(len(raw), -1)


def _scale(raw: np.ndarray[Any, Any], stored: _Stored) -> np.ndarray[Any, Any]:
    blocks = raw.reshape(len(raw), -1, 18)
    return np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]


def _float(raw: np.ndarray[Any, Any], stored: _Stored) -> np.ndarray[Any, Any]:
    if stored.type_name in _FLOAT_TYPES:
        return raw.view(DTYPES[stored.type_name])
    import gguf

    try:
        with np.errstate(all="ignore"):  # NaN and infinity are refused by whoever reads them
            values: np.ndarray[Any, Any] = gguf.dequantize(raw, gguf.GGMLQuantizationType[stored.type_name])
    except NotImplementedError as error:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name!r} is {stored.type_name}, which the gguf package can't read"
        ) from error
    return values


_DECODERS: Mapping[str, Any] = {"codes": _codes, "scale": _scale, "float": _float}
