"""Modules as a checkpoint stores them: checked by their headers, read when asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.scheme import Scheme
from jax_w4a8.checkpoint.tensors import TensorFiles
from jax_w4a8.quantization import CODE_MAX, CODE_MIN, QuantizedTensor

CODES_PER_WORD = 8


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A floating point tensor.

    Attributes:
      files: where it is.
      name: the tensor's name.
      nonzero: refuse a tensor of nothing but zeros (one that was never filled).
    """

    files: TensorFiles = dataclasses.field(repr=False)
    name: str
    nonzero: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.files.headers[self.name].shape

    @property
    def nbytes(self) -> int:
        """Bytes on disk, and in memory."""
        return self.files.headers[self.name].nbytes

    @property
    def dtype_name(self) -> str:
        """safetensors' name of the dtype."""
        return self.files.headers[self.name].dtype

    def read(self) -> np.ndarray[Any, Any]:
        """The values, in the checkpoint's dtype.

        Raises:
          CheckpointError: a value is NaN or infinite, or all are zero and mustn't be.
        """
        values = self.files.read(self.name)
        file = self.files.headers[self.name].file
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file}: tensor {self.name!r} holds NaN or infinity")
        if self.nonzero and not values.any():
            raise CheckpointError(f"{file}: tensor {self.name!r} is all zeros")
        return values


@dataclasses.dataclass(frozen=True)
class StoredLinear:
    """The weights of a linear map, ``[N, K]``, quantised or not.

    Attributes:
      files: where its tensors are.
      name: the module's name.
      out_features, in_features: N and K.
      scheme: None for floating point.
      weight: the floating point weight, None when quantised.
      bias: floating point ``[N]`` or None.
    """

    files: TensorFiles = dataclasses.field(repr=False)
    name: str
    out_features: int
    in_features: int
    scheme: Scheme | None
    weight: StoredArray | None = None
    bias: StoredArray | None = None

    @property
    def scale_dtype(self) -> str | None:
        """safetensors' name of the scales' dtype; None when not quantised."""
        return None if self.scheme is None else self.files.headers[self._tensor("scale")].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors on disk."""
        return sum(self.files.headers[name].nbytes for name in self.files.modules[self.name])

    def read(self) -> QuantizedTensor | np.ndarray[Any, Any]:
        """int8 codes with their scales, or the floating point weight; numpy arrays.

        Raises:
          CheckpointError: a code outside [-8, 7], NaN or infinity, or a ``weight_shape`` that doesn't fit.
        """
        if self.weight is not None:
            return self.weight.read()
        return self.read_quantized()

    def read_quantized(self) -> QuantizedTensor:
        """As :meth:`read`, of a quantised module.

        Raises:
          CheckpointError: as :meth:`read`, and for a module in floating point.
        """
        if self.scheme is None:
            raise CheckpointError(f"module {self.name!r} is in floating point, expected INT4 weights")
        packed = self._tensor("packed") in self.files.headers
        codes = self._read_packed() if packed else self._read_bytes()
        self._check_group_index()
        scale = self.files.read(self._tensor("scale"))
        if not np.isfinite(scale).all():
            raise self._error("scale", "holds NaN or infinity")
        return QuantizedTensor(codes, scale, self.scheme.group_size)

    def _tensor(self, suffix: str) -> str:
        return f"{self.name}.weight_{suffix}"

    def _error(self, suffix: str, what: str) -> CheckpointError:
        name = self._tensor(suffix) if suffix else f"{self.name}.weight"
        return CheckpointError(f"{self.files.headers[name].file}: tensor {name!r} {what}")

    def _read_bytes(self) -> np.ndarray[Any, Any]:
        codes = self.files.read(f"{self.name}.weight")
        low, high = int(codes.min()), int(codes.max())
        if low < CODE_MIN or high > CODE_MAX:
            worst = low if low < CODE_MIN else high
            raise self._error("", f"must hold codes of [{CODE_MIN}, {CODE_MAX}], found {worst}")
        return codes

    def _read_packed(self) -> np.ndarray[Any, Any]:
        shape = tuple(int(n) for n in self.files.read(self._tensor("shape")))
        expected = (self.out_features, self.in_features)
        if shape != expected:
            raise self._error("shape", f"must hold {list(expected)}, got {list(shape)}")
        return unpack_words(self.files.read(self._tensor("packed")), self.in_features)

    def _check_group_index(self) -> None:
        """Inputs may not be permuted: an index of groups must be absent, trivial, or unset (-1)."""
        name = self._tensor("g_idx")
        if name not in self.files.headers or self.scheme is None:
            return
        index = self.files.read(name)
        trivial = np.arange(self.in_features) // max(self.scheme.group_size, 1)
        if self.scheme.group_size < 0:
            trivial = np.zeros_like(trivial)
        if not (np.array_equal(index, trivial) or (index == -1).all()):
            raise self._error("g_idx", "permutes inputs (actorder 'group'), which isn't supported")


def unpack_words(words: np.ndarray[Any, Any], in_features: int) -> np.ndarray[Any, Any]:
    """int8 codes ``[N, K]`` of int32 words ``[N, ceil(K / 8)]``.

    Each word holds eight codes, each plus 8 in four bits, the lowest index in the lowest bits
    (compressed-tensors ``pack_to_int32``).
    """
    rows = words.shape[0]
    pairs = np.ascontiguousarray(words, "<i4").view(np.uint8)
    codes = np.empty((rows, pairs.shape[1], 2), np.int8)
    np.bitwise_and(pairs, 15, out=codes[..., 0].view(np.uint8))
    np.right_shift(pairs, 4, out=codes[..., 1].view(np.uint8))
    codes -= 8
    return codes.reshape(rows, -1)[:, :in_features]


def pack_words(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The inverse of :func:`unpack_words`; a last word is filled up with code -8."""
    rows, columns = codes.shape
    offset = np.zeros((rows, -(-columns // CODES_PER_WORD) * CODES_PER_WORD), np.uint8)
    np.add(codes.view(np.uint8), np.uint8(8), out=offset[:, :columns])  # wraps to 0..15
    pairs = offset[:, 0::2] | (offset[:, 1::2] << np.uint8(4))
    words: np.ndarray[Any, Any] = np.ascontiguousarray(pairs).view("<i4").astype(np.int32, copy=False)
    return words
