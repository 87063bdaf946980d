"""Expert, tensor and data parallelism over a mesh: what is where.

:class:`ExpertSharding` (for :func:`jax_w4a8.moe`, ``fused_experts``, ``apply_experts``) and
:class:`LinearSharding` (for :func:`jax_w4a8.linear`) say which mesh axes split what; :func:`place` puts
packed weights there, each device getting its slices alone. Calls then run under ``jax.shard_map``, every
device on its own slices, and add up by one ``psum``; without it, XLA would gather whatever a custom call
takes. Operands whose sharding JAX shows (concrete arrays, and tracers on Explicit mesh axes) need no
``sharding`` argument.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_w4a8.partition import (
    Split,
    expert_split_reason,
    intermediate_split_reason,
    part_of,
    split_experts,
    split_inputs,
)
from jax_w4a8.quantization import CHANNELWISE
from jax_w4a8.weights import ExpertWeights, LinearWeights

__all__ = [
    "ExpertSharding",
    "LinearSharding",
    "named_shardings",
    "partition_specs",
    "place",
    "place_experts",
    "place_tokens",
    "prepare",
    "replicate",
]

#: A mesh axis, or several that together split one dimension, the first one slowest.
Axes = str | tuple[str, ...] | None
#: Nothing is split.
WHOLE = PartitionSpec()
Weights = TypeVar("Weights", LinearWeights, ExpertWeights)


def _names(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _entry(axes: Axes) -> Axes:
    """``axes`` as PartitionSpec writes them."""
    names = _names(axes)
    return names if len(names) > 1 else (names[0] if names else None)


def _check_mesh(mesh: Any, names: tuple[str, ...]) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"mesh has the axes {mesh.axis_names}, and none named {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"mesh axis {name!r} is used for more than one purpose")


class _Sharding(abc.ABC):
    """What both kinds of sharding share. ``mesh`` and ``tokens`` are fields of theirs."""

    mesh: Mesh | AbstractMesh
    tokens: PartitionSpec
    weights_type: ClassVar[type]

    def _check(self, *axes: Axes) -> None:
        """Brings ``tokens`` into form and checks the names of all axes."""
        tokens = self.tokens
        if not isinstance(tokens, PartitionSpec):
            tokens = PartitionSpec() if tokens is None else PartitionSpec(_entry(tokens))
            object.__setattr__(self, "tokens", tokens)
        _check_mesh(self.mesh, tuple(name for entry in (*axes, *tokens) for name in _names(entry)))

    def _parts(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[name] for name in _names(axes))

    def check_tokens(self, lead: tuple[int, ...]) -> None:
        """Raises ValueError unless leading axes of these sizes can be split as ``tokens`` says."""
        if len(self.tokens) > len(lead):
            raise ValueError(f"tokens = {self.tokens} splits more leading axes than x has, {len(lead)}")
        for axis, (size, entry) in enumerate(zip(lead, self.tokens, strict=False)):
            if size % self._parts(entry):
                raise ValueError(
                    f"tokens = {self.tokens} splits axis {axis} of x over {self._parts(entry)} shards, "
                    f"which don't divide its size, {size}"
                )

    def token_spec(self, ndim: int, last: Axes = None) -> PartitionSpec:
        """Of an array whose leading axes are those of x, and whose last one is split over ``last``."""
        return PartitionSpec(*self.tokens, *[None] * (ndim - 1 - len(self.tokens)), _entry(last))

    @property
    @abc.abstractmethod
    def reduced_axes(self) -> tuple[str, ...]:
        """Mesh axes over which partial results are added up."""

    @abc.abstractmethod
    def check(self, weights: Any) -> None:
        """Raises ValueError unless the weights come apart into equal slices."""

    @abc.abstractmethod
    def unprepared_reason(self, weights: Any) -> str | None:
        """Why the weights can't be sliced as they are, or None."""

    @abc.abstractmethod
    def specs(self, weights: Any) -> Any:
        """See :func:`partition_specs`."""

    @abc.abstractmethod
    def prepare(self, weights: Any) -> Any:
        """See :func:`prepare`."""

    @abc.abstractmethod
    def local(self, weights: Any) -> Any:
        """Inside ``shard_map``: this device's slices as weights of their own."""


@dataclasses.dataclass(frozen=True)
class ExpertSharding(_Sharding):
    """How an MoE layer is spread over a mesh. Hashable: static under ``jit``.

    Attributes:
      mesh: the devices.
      expert_axis: mesh axis, or axes, that split the experts (expert parallelism).
      tensor_axis: mesh axis that splits every expert's intermediate size (tensor parallelism). Each device
        quantises its own slice of the inner row, by that slice's range.
      tokens: how the leading axes of x are split (data parallelism): a PartitionSpec, or the name of the mesh
        axis that splits the first one.
      bitwise: add up each slot's output across devices, then combine: k times the bytes to send, and
        expert-parallel results equal those of one device bit for bit. Otherwise every device combines its
        own slots first, which changes the order of float32 additions.

    Raises:
      TypeError, ValueError: ``mesh`` is none, lacks an axis, or one axis has two purposes.
    """

    weights_type: ClassVar[type] = ExpertWeights

    mesh: Mesh | AbstractMesh
    expert_axis: Axes = None
    tensor_axis: Axes = None
    tokens: PartitionSpec = WHOLE
    bitwise: bool = False

    def __post_init__(self) -> None:
        self._check(self.expert_axis, self.tensor_axis)

    @property
    def ep_size(self) -> int:
        """Expert-parallel shards."""
        return self._parts(self.expert_axis)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel shards."""
        return self._parts(self.tensor_axis)

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """See the base class."""
        return (*_names(self.expert_axis), *_names(self.tensor_axis))

    def check(self, weights: ExpertWeights) -> None:
        """See the base class."""
        self._check_sizes(weights.num_experts, weights)

    def _check_sizes(self, num_experts: int, weights: ExpertWeights) -> None:
        reason = expert_split_reason(num_experts, self.ep_size) or intermediate_split_reason(
            weights.intermediate_size, weights.w2.group_size, self.tp_size
        )
        if reason is not None:
            raise ValueError(f"experts can't be sharded: {reason}")

    def unprepared_reason(self, weights: ExpertWeights) -> str | None:
        """See the base class."""
        return _unprepared_reason("experts", weights.w2, self.tp_size)

    def specs(self, weights: ExpertWeights) -> ExpertWeights:
        """See the base class."""
        self.check(weights)
        lead = (self.expert_axis,)
        return ExpertWeights(
            w13=_matrix_specs(weights.w13, lead, self.tensor_axis, None),
            w2=_matrix_specs(weights.w2, lead, None, self.tensor_axis),
        )

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """See the base class."""
        self.check(weights)
        return split_experts(weights, self.tp_size)

    def local(self, weights: ExpertWeights) -> ExpertWeights:
        """See the base class."""
        return ExpertWeights(
            w13=part_of(weights.w13, out_parts=self.tp_size), w2=part_of(weights.w2, in_parts=self.tp_size)
        )

    def local_ids(self, ids: jax.Array, num_experts: int) -> jax.Array:
        """Inside ``shard_map``: ids as the device's own ``num_experts`` experts count them.

        Experts of other devices become -1; what is no expert at all stays out of range.
        """
        names = _names(self.expert_axis)
        if not names:
            return ids
        first = lax.axis_index(names).astype(jnp.int32) * num_experts
        here = (ids >= first) & (ids < first + num_experts)
        elsewhere = (ids >= 0) & (ids < self.ep_size * num_experts)
        return jnp.where(here, ids - first, jnp.where(elsewhere, -1, ids))


@dataclasses.dataclass(frozen=True)
class LinearSharding(_Sharding):
    """How a linear map is spread over a mesh. Hashable: static under ``jit``.

    Attributes:
      mesh: the devices.
      out_axis: mesh axis that splits the output channels (column-parallel). Results are those of one device,
        bit for bit, and stay split.
      in_axis: mesh axis that splits the inputs (row-parallel). Each device quantises its own slice of a row,
        by that slice's range; the partial results are added up by one psum. x may come split, as a
        column-parallel layer leaves it, or whole.
      tokens: as :class:`ExpertSharding`.

    Raises:
      TypeError, ValueError: ``mesh`` is none, lacks an axis, or one axis has two purposes.
    """

    weights_type: ClassVar[type] = LinearWeights

    mesh: Mesh | AbstractMesh
    out_axis: Axes = None
    in_axis: Axes = None
    tokens: PartitionSpec = WHOLE

    def __post_init__(self) -> None:
        self._check(self.out_axis, self.in_axis)

    @property
    def out_size(self) -> int:
        """Column-parallel shards."""
        return self._parts(self.out_axis)

    @property
    def in_size(self) -> int:
        """Row-parallel shards."""
        return self._parts(self.in_axis)

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """See the base class."""
        return _names(self.in_axis)

    def check(self, weights: LinearWeights) -> None:
        """See the base class."""
        columns = Split("out_features", weights.out_features, "out_size", self.out_size)
        rows = Split("in_features", weights.in_features, "in_size", self.in_size)
        reason = columns.output_reason() or rows.input_reason(weights.group_size)
        if reason is not None:
            raise ValueError(f"weights can't be sharded: {reason}")

    def unprepared_reason(self, weights: LinearWeights) -> str | None:
        """See the base class."""
        return _unprepared_reason("weights", weights, self.in_size)

    def specs(self, weights: LinearWeights) -> LinearWeights:
        """See the base class."""
        self.check(weights)
        lead = (None,) * (weights.codes.ndim - 3)
        return _matrix_specs(weights, lead, self.out_axis, self.in_axis)

    def prepare(self, weights: LinearWeights) -> LinearWeights:
        """See the base class."""
        self.check(weights)
        return split_inputs(weights, self.in_size)

    def local(self, weights: LinearWeights) -> LinearWeights:
        """See the base class."""
        return part_of(weights, self.out_size, self.in_size)


Sharding = ExpertSharding | LinearSharding


def _unprepared_reason(name: str, weights: LinearWeights, parts: int) -> str | None:
    blocks = weights.codes.shape[-3] * parts
    if weights.scaled_sum.shape[-2] == blocks:
        return None
    return (
        f"{name} aren't prepared for slices of their inputs over {parts} shards (scaled_sum has "
        f"{weights.scaled_sum.shape[-2]} blocks, not {blocks}): see jax_w4a8.sharding.place"
    )


def _matrix_specs(
    weights: LinearWeights, lead: tuple[Axes, ...], out_axis: Axes, in_axis: Axes
) -> LinearWeights:
    lead, out_axis, in_axis = tuple(map(_entry, lead)), _entry(out_axis), _entry(in_axis)
    spec = PartitionSpec
    grouped = weights.group_size != CHANNELWISE
    channels = spec(*lead, _entry((*_names(in_axis), *_names(out_axis))), None)  # see split_inputs
    return dataclasses.replace(
        weights,
        codes=spec(*lead, out_axis, in_axis, None) if grouped else spec(*lead, out_axis, None, in_axis),
        scale=spec(*lead, out_axis, in_axis if grouped else None, None),
        scaled_sum=channels,
        bias=channels,
    )


def _check_kind(weights: Any, sharding: Any) -> None:
    if not isinstance(sharding, _Sharding):
        raise TypeError(
            f"sharding must be an ExpertSharding or a LinearSharding, got {type(sharding).__name__}"
        )
    if not isinstance(weights, sharding.weights_type):
        raise TypeError(
            f"a {type(sharding).__name__} is for {sharding.weights_type.__name__}, "
            f"got {type(weights).__name__}"
        )


def partition_specs(weights: Weights, sharding: Sharding) -> Weights:
    """The PartitionSpec of each array of packed weights: a pytree like ``weights``, for ``in_specs``.

    Args:
      weights: packed weights; leading axes of a :class:`LinearWeights` stay whole.
      sharding: an :class:`ExpertSharding` for experts, a :class:`LinearSharding` for a linear map.

    Raises:
      TypeError: the two don't belong together.
      ValueError: sizes don't come apart into equal slices of the packed arrays.
    """
    _check_kind(weights, sharding)
    specs: Weights = sharding.specs(weights)  # type: ignore[arg-type, assignment]
    return specs


def named_shardings(weights: Weights, sharding: Sharding) -> Weights:
    """:func:`partition_specs` with their mesh, for ``jax.device_put``, ``in_shardings``, checkpoints.

    Raises:
      As :func:`partition_specs`.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(sharding.mesh, spec),
        partition_specs(weights, sharding),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def prepare(weights: Weights, sharding: Sharding) -> Weights:
    """Packed weights whose arrays can be sliced by :func:`partition_specs`; :func:`place` begins with it.

    Only splitting by inputs (``in_axis``, and ``tensor_axis`` of experts) changes anything: the sums and
    biases of the slices, small arrays, are made anew. Such weights can't be used without ``sharding``.

    Raises:
      As :func:`partition_specs`.
    """
    _check_kind(weights, sharding)
    prepared: Weights = sharding.prepare(weights)  # type: ignore[arg-type, assignment]
    return prepared


def place(weights: Weights, sharding: Sharding) -> Weights:
    """Puts packed weights on the mesh, each device receiving its own slices and nothing else.

    Works across processes too: each one takes the slices of its own devices from its copy of ``weights``.
    :func:`place_experts` needs no whole copy.

    Args:
      weights: packed weights as :func:`jax_w4a8.pack_experts` or ``pack_linear`` give them, best as numpy
        arrays.
      sharding: an :class:`ExpertSharding` or a :class:`LinearSharding`.

    Returns:
      The weights as global arrays; pass them on with the same ``sharding``.

    Raises:
      As :func:`partition_specs`.
    """
    return jax.tree.map(_put, prepare(weights, sharding), named_shardings(weights, sharding))


def _put(array: Any, target: NamedSharding) -> jax.Array:
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def replicate(tree: Any, sharding: Sharding) -> Any:
    """Puts whole copies of host arrays on every device of the mesh, across processes too."""
    target = NamedSharding(sharding.mesh, WHOLE)
    return jax.tree.map(lambda array: _put(array, target), tree)


def place_tokens(array: Any, sharding: Sharding) -> jax.Array:
    """Puts an array whose axes are the leading axes of x, such as token ids, where x will be.

    An array that spans processes already stays as it is.

    Raises:
      ValueError: an axis can't be split as ``sharding.tokens`` says.
    """
    sharding.check_tokens(array.shape)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array
    spec = sharding.token_spec(array.ndim + 1)
    return _put(array, NamedSharding(sharding.mesh, PartitionSpec(*spec[:-1])))


def place_experts(
    read: Callable[[int, int], ExpertWeights], num_experts: int, sharding: ExpertSharding
) -> ExpertWeights:
    """As :func:`place`, but asks for experts in runs, and only for those that this process's devices hold.

    Args:
      read: gives packed experts from one id up to another, exclusive, as numpy arrays.
      num_experts: E of the whole layer.
      sharding: where they go.

    Raises:
      As :func:`partition_specs`.
    """
    reason = expert_split_reason(num_experts, sharding.ep_size)
    if reason is not None:
        raise ValueError(f"experts can't be sharded: {reason}")
    lead = NamedSharding(sharding.mesh, PartitionSpec(_entry(sharding.expert_axis)))
    indices = lead.addressable_devices_indices_map((num_experts,)).values()
    runs = sorted({index[0].indices(num_experts)[:2] for index in indices if index is not None})
    parts = [read(*run) for run in runs]
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_experts, *leaf.shape[1:]), leaf.dtype), parts[0]
    )
    shardings = named_shardings(shapes, sharding)
    prepared = [split_experts(part, sharding.tp_size) for part in parts]

    def put(target: NamedSharding, *leaves: np.ndarray[Any, Any]) -> jax.Array:
        by_run = dict(zip(runs, leaves, strict=True))

        def slice_of(index: Any) -> np.ndarray[Any, Any]:
            return by_run[index[0].indices(num_experts)[:2]][:, *index[1:]]

        return jax.make_array_from_callback((num_experts, *leaves[0].shape[1:]), target, slice_of)

    return jax.tree.map(put, shardings, *prepared)
