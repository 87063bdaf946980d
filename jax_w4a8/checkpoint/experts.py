"""The experts of one layer: read one at a time, packed, and copied into their place in one buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_w4a8.buffers import aligned_empty
from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.scheme import Scheme
from jax_w4a8.checkpoint.stored import StoredArray, StoredLinear
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.weights import ExpertWeights, pack_experts


class ExpertStack:
    """Packed weights of E experts, filled in one expert at a time.

    Only one expert is ever held unpacked. The buffers are allocated with the first one; they start at
    multiples of 64 bytes, so that JAX takes them over without a copy.
    """

    def __init__(self, num_experts: int) -> None:
        """Raises ValueError unless there is at least one expert."""
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        self._missing = set(range(num_experts))
        self._num_experts = num_experts
        self._stack: ExpertWeights | None = None

    def put(
        self,
        expert: int,
        w13: QuantizedTensor,
        w2: QuantizedTensor,
        w13_bias: np.ndarray[Any, Any] | None = None,
        w2_bias: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Packs one expert and copies it into its place.

        Args:
          expert: its id.
          w13: numpy codes ``[2I, H]`` and scales, gate first.
          w2: numpy codes ``[H, I]`` and scales.
          w13_bias, w2_bias: floating point ``[2I]`` and ``[H]``, or None.

        Raises:
          ValueError: the id was put before or is out of range, or the expert differs from the others in
            shape, group size or scale dtype.
        """
        if expert not in self._missing:
            raise ValueError(f"expert {expert} is out of range or was put before")
        packed = pack_experts(_with_axis(w13), _with_axis(w2), _with_axis(w13_bias), _with_axis(w2_bias))
        if self._stack is None:
            self._stack = jax.tree.map(self._allocate, packed)
        expected: object = jax.tree.structure(self._stack)
        if expected != jax.tree.structure(packed):
            raise ValueError(f"expert {expert} differs in sizes or group size from the others")
        jax.tree.map(lambda stack, part: _copy_into(stack, part, expert), self._stack, packed)
        self._missing.remove(expert)

    def finish(self) -> ExpertWeights:
        """The filled buffers, numpy arrays with leading axis E.

        Raises:
          ValueError: an expert was never put.
        """
        if self._missing or self._stack is None:
            raise ValueError(f"experts {sorted(self._missing)} were never put")
        return self._stack

    def _allocate(self, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return aligned_empty((self._num_experts, *part.shape[1:]), part.dtype)


def _with_axis(value: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], value)


def _copy_into(stack: np.ndarray[Any, Any], part: np.ndarray[Any, Any], expert: int) -> None:
    if part.dtype != stack.dtype or part.shape[1:] != stack.shape[1:]:
        raise ValueError(
            f"expert {expert} has {part.dtype} {part.shape[1:]} where the others have {stack.dtype} "
            f"{stack.shape[1:]}"
        )
    stack[expert] = part[0]


@dataclasses.dataclass(frozen=True)
class StoredExperts:
    """The experts of a layer as a checkpoint stores them, each by its three projections.

    Attributes:
      name: what the layer's experts are called.
      gates, ups: ``[I, H]`` of each expert.
      downs: ``[H, I]`` of each expert.
    """

    name: str
    gates: Sequence[StoredLinear]
    ups: Sequence[StoredLinear]
    downs: Sequence[StoredLinear]

    def __post_init__(self) -> None:
        """Raises CheckpointError unless all projections are quantised by one scheme."""
        first, scheme = self.gates[0], self.scheme
        for other in (*self.gates, *self.ups, *self.downs):
            if (other.scheme, other.scale_dtype) != (scheme, first.scale_dtype):
                raise CheckpointError(
                    f"all projections of {self.name!r} must have one scheme: {first.name!r} has "
                    f"{scheme} with {first.scale_dtype} scales, {other.name!r} has {other.scheme} "
                    f"with {other.scale_dtype}"
                )

    def __len__(self) -> int:
        return len(self.gates)

    @property
    def scheme(self) -> Scheme:
        """The scheme of all projections."""
        scheme = self.gates[0].scheme
        if scheme is None:
            raise CheckpointError(
                f"module {self.gates[0].name!r} is not quantised; experts in floating point aren't supported"
            )
        return scheme

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(part.nbytes for part in (*self.gates, *self.ups, *self.downs))

    def run(self, start: int, stop: int) -> StoredExperts:
        """Experts from ``start`` up to ``stop``, exclusive."""
        parts = (self.gates[start:stop], self.ups[start:stop], self.downs[start:stop])
        return StoredExperts(self.name, *parts)

    def read(self, progress: Callable[[int], None] = lambda nbytes: None) -> ExpertWeights:
        """Reads and packs one expert after the other.

        Args:
          progress: called after each expert with the bytes that it takes on disk.

        Returns:
          Packed weights, numpy arrays.

        Raises:
          CheckpointError: as :meth:`StoredLinear.read`.
        """
        stack = ExpertStack(len(self))
        for expert, parts in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            gate, up, down = parts
            stack.put(
                expert,
                _concatenate(gate.read_quantized(), up.read_quantized()),
                down.read_quantized(),
                _concatenate_biases(gate.bias, up.bias),
                None if down.bias is None else down.bias.read(),
            )
            progress(sum(part.nbytes for part in parts))
        return stack.finish()


def _concatenate(gate: QuantizedTensor, up: QuantizedTensor) -> QuantizedTensor:
    codes = np.concatenate([gate.codes, up.codes])
    return QuantizedTensor(codes, np.concatenate([gate.scale, up.scale]), gate.group_size)


def _concatenate_biases(gate: StoredArray | None, up: StoredArray | None) -> np.ndarray[Any, Any] | None:
    if gate is None or up is None:
        return None
    return np.concatenate([gate.read(), up.read()])
