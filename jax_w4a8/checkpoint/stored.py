"""Modules as a checkpoint stores them: checked by their headers, read when asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.scheme import Scheme
from jax_w4a8.checkpoint.tensors import TensorFiles
from jax_w4a8.quantization import CODE_MAX, CODE_MIN, QuantizedTensor, QuantizedWords
from jax_w4a8.weights import LinearWeights, pack_linear


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

    def read_whole(self, progress: Callable[[int], None]) -> np.ndarray[Any, Any]:
        """As :meth:`read`; then ``progress`` is called with the bytes that it takes on disk."""
        values = self.read()
        progress(self.nbytes)
        return values

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
        weights = self.read_unchecked()
        self.check_values(weights)
        return weights.unpack() if isinstance(weights, QuantizedWords) else weights

    def read_whole(
        self, progress: Callable[[int], None]
    ) -> tuple[LinearWeights | np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        """Packed weights and None, or the floating point weight and its bias; numpy arrays.

        Args:
          progress: called at the end with the bytes that all tensors take on disk.

        Raises:
          CheckpointError: as :meth:`read`.
        """
        weight: LinearWeights | np.ndarray[Any, Any]
        if self.weight is None:
            weight, bias = self.read_packed(), None
        else:
            weight, bias = self.weight.read(), None if self.bias is None else self.bias.read()
        progress(self.nbytes)
        return weight, bias

    def read_packed(self) -> LinearWeights:
        """A quantised module, its bias included, packed for the kernels; numpy arrays.

        Raises:
          CheckpointError: as :meth:`read_quantized`.
        """
        bias = None if self.bias is None else self.bias.read()
        weights = self.read_unchecked()
        try:
            return pack_linear(weights, bias)
        except ValueError:
            self.check_values(weights)
            raise

    def read_unchecked(self) -> QuantizedTensor | QuantizedWords:
        """A quantised module as it is stored; packing finds values that must not be.

        Raises:
          CheckpointError: the module is in floating point, or its ``weight_shape`` or group index is wrong.
        """
        if self.scheme is None:
            raise CheckpointError(f"module {self.name!r} is in floating point, expected INT4 weights")
        self._check_group_index()
        scale = self.files.read(self._tensor("scale"))
        if self.scheme.storage == "pack-quantized":
            return QuantizedWords(self._read_words(), scale, self.in_features, self.scheme.group_size)
        codes = self.files.read(f"{self.name}.weight")
        return QuantizedTensor(codes, scale, self.scheme.group_size)

    def check_values(self, weights: QuantizedTensor | QuantizedWords) -> None:
        """Raises CheckpointError, naming the tensor, for a code out of range or a scale that isn't finite."""
        if isinstance(weights, QuantizedTensor):
            low, high = int(weights.codes.min()), int(weights.codes.max())
            if low < CODE_MIN or high > CODE_MAX:
                worst = low if low < CODE_MIN else high
                raise self._error("", f"must hold codes of [{CODE_MIN}, {CODE_MAX}], found {worst}")
        if not np.isfinite(weights.scale).all():
            raise self._error("scale", "holds NaN or infinity")

    def _tensor(self, suffix: str) -> str:
        return f"{self.name}.weight_{suffix}"

    def _error(self, suffix: str, what: str) -> CheckpointError:
        name = self._tensor(suffix) if suffix else f"{self.name}.weight"
        return CheckpointError(f"{self.files.headers[name].file}: tensor {name!r} {what}")

    def _read_words(self) -> np.ndarray[Any, Any]:
        shape = tuple(int(n) for n in self.files.read(self._tensor("shape")))
        expected = (self.out_features, self.in_features)
        if shape != expected:
            raise self._error("shape", f"must hold {list(expected)}, got {list(shape)}")
        return self.files.read(self._tensor("packed"))

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
