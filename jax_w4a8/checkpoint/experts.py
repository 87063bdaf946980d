"""The experts of one layer: read one at a time, and packed into their place in one buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jax_w4a8.buffers import aligned_empty
from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.scheme import Scheme
from jax_w4a8.checkpoint.stored import StoredLinear
from jax_w4a8.checkpoint.tensors import DTYPES
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.threads import Workers
from jax_w4a8.weights import ExpertParts, ExpertWeights, fill_expert


class ExpertStack:
    """Packed weights of E experts, filled in one expert at a time, each packed straight into its place.

    The buffers are allocated with the first one; they start at multiples of 64 bytes, so that JAX takes them
    over without a copy.
    """

    def __init__(self, num_experts: int, workers: Workers | None = None) -> None:
        """Raises ValueError unless there is at least one expert. Without ``workers`` each put starts some."""
        if num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        self._missing = set(range(num_experts))
        self._num_experts = num_experts
        self._workers = workers
        self._form: Any = None
        self._stack: ExpertWeights | None = None

    def put(
        self,
        expert: int,
        w13: QuantizedTensor,
        w2: QuantizedTensor,
        w13_bias: np.ndarray[Any, Any] | None = None,
        w2_bias: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Packs one expert into its place.

        Args:
          expert: its id.
          w13: numpy codes ``[2I, H]`` and scales, gate first.
          w2: numpy codes ``[H, I]`` and scales.
          w13_bias, w2_bias: floating point ``[2I]`` and ``[H]``, or None.

        Raises:
          TypeError, ValueError: as :meth:`put_parts`.
        """
        intermediate = w2.shape[-1]
        gate, up = (
            jax.tree.map(lambda leaf, rows=rows: leaf[rows], (w13, w13_bias))
            for rows in (slice(0, intermediate), slice(intermediate, None))
        )
        self.put_parts(expert, ExpertParts(gate[0], up[0], w2, gate[1], up[1], w2_bias))

    def put_parts(self, expert: int, parts: ExpertParts) -> None:
        """As :meth:`put`, of an expert in three parts.

        Raises:
          TypeError, ValueError: the id was put before or is out of range, parts don't fit together, the
            expert differs from the others in shape, group size or scale dtype, a code is outside [-8, 7] or a
            scale isn't finite.
        """
        if expert not in self._missing:
            raise ValueError(f"expert {expert} is out of range or was put before")
        parts.check_form()
        form = [(part.shape, part.group_size) for part in parts[:3]]
        dtypes = [part.scale.dtype for part in parts[:3]]
        if self._stack is None:
            self._form = form, dtypes
            self._stack = parts.empty(self._num_experts)
        if form != self._form[0]:
            raise ValueError(f"expert {expert} differs in sizes or group size from the others")
        for dtype, other in zip(dtypes, self._form[1], strict=True):
            if dtype != other:
                raise ValueError(f"expert {expert} has {dtype} scales where the others have {other}")
        fill_expert(self._stack, expert, parts, self._workers)
        self._missing.remove(expert)

    def finish(self) -> ExpertWeights:
        """The filled buffers, numpy arrays with leading axis E.

        Raises:
          ValueError: an expert was never put.
        """
        if self._missing or self._stack is None:
            raise ValueError(f"experts {sorted(self._missing)} were never put")
        return self._stack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatExperts:
    """The weights of E experts in floating point, for layers that a checkpoint leaves unquantised.

    Attributes:
      w13: gate and up projections ``[E, 2I, H]``, gate first.
      w2: down projections ``[E, H, I]``.
      w13_bias, w2_bias: float32 ``[E, 2I]`` and ``[E, H]``, or None.
    """

    w13: Any
    w2: Any
    w13_bias: Any = None
    w2_bias: Any = None


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
        """Raises CheckpointError unless there are experts, all stored in one way."""
        if not self.gates:
            raise CheckpointError(f"{self.name!r} must have at least one expert, got 0")
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
    def scheme(self) -> Scheme | None:
        """The scheme of all projections, None for floating point."""
        return self.gates[0].scheme

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(part.nbytes for part in (*self.gates, *self.ups, *self.downs))

    def run(self, start: int, stop: int) -> StoredExperts:
        """Experts from ``start`` up to ``stop``, exclusive."""
        parts = (self.gates[start:stop], self.ups[start:stop], self.downs[start:stop])
        return StoredExperts(self.name, *parts)

    def read(self, progress: Callable[[int], None] = lambda nbytes: None) -> ExpertWeights:
        """Reads one expert after the other, and packs each while the next one is read.

        Args:
          progress: called after each expert with the bytes that it takes on disk.

        Returns:
          Packed weights, numpy arrays. Beside them, memory holds two experts as they are stored.

        Raises:
          CheckpointError: as :meth:`StoredLinear.read`, and for experts in floating point.
        """
        with Workers() as workers, ThreadPoolExecutor(1, "jax_w4a8_reader") as reader:
            stack = ExpertStack(len(self), workers)
            upcoming = reader.submit(self._read_one, 0)
            for expert in range(len(self)):
                parts = upcoming.result()
                if expert + 1 < len(self):
                    upcoming = reader.submit(self._read_one, expert + 1)
                try:
                    stack.put_parts(expert, parts)
                except ValueError:
                    self._name_bad_value(expert, parts)
                    raise
                del parts
                progress(sum(part.nbytes for part in self._modules(expert)))
        return stack.finish()

    def _modules(self, expert: int) -> tuple[StoredLinear, StoredLinear, StoredLinear]:
        return self.gates[expert], self.ups[expert], self.downs[expert]

    def read_float(self, progress: Callable[[int], None] = lambda nbytes: None) -> FloatExperts:
        """As :meth:`read`, of experts in floating point: stacked, in the checkpoint's dtype.

        Raises:
          CheckpointError: a value is NaN or infinite, or the experts are quantised.
        """
        down = self.downs[0]
        if self.scheme is not None or down.weight is None:
            raise CheckpointError(f"experts {self.name!r} are quantised, expected floating point")
        count, hidden, inner = len(self), down.out_features, down.in_features
        dtype = DTYPES[down.weight.dtype_name]
        biased = down.bias is not None
        experts = FloatExperts(
            w13=aligned_empty((count, 2 * inner, hidden), dtype),
            w2=aligned_empty((count, hidden, inner), dtype),
            w13_bias=aligned_empty((count, 2 * inner), np.float32) if biased else None,
            w2_bias=aligned_empty((count, hidden), np.float32) if biased else None,
        )
        for expert, parts in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            for part, rows, weight, bias in (
                (parts[0], slice(0, inner), experts.w13, experts.w13_bias),
                (parts[1], slice(inner, None), experts.w13, experts.w13_bias),
                (parts[2], slice(None), experts.w2, experts.w2_bias),
            ):
                weight[expert, rows] = part.read()
                if bias is not None and part.bias is not None:
                    bias[expert, rows] = part.bias.read()
            progress(sum(part.nbytes for part in parts))
        return experts

    def _read_one(self, expert: int) -> ExpertParts:
        modules = self._modules(expert)
        gate, up, down = (module.read_unchecked() for module in modules)
        return ExpertParts(gate, up, down, *(None if m.bias is None else m.bias.read() for m in modules))

    def _name_bad_value(self, expert: int, parts: ExpertParts) -> None:
        """Raises CheckpointError for the tensor at fault, if one is."""
        for module, weights in zip(self._modules(expert), parts[:3], strict=True):
            module.check_values(weights)
