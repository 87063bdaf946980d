"""Runs calls under ``jax.shard_map``, and sees from operands how they are spread when nobody said so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_w4a8.quantization import CHANNELWISE
from jax_w4a8.sharding import ExpertSharding, LinearSharding
from jax_w4a8.weights import ExpertWeights, LinearWeights

Tree = TypeVar("Tree")
Seen = tuple[Mesh | AbstractMesh, tuple[Any, ...]]


def vary_together(tree: Tree) -> Tree:
    """Inside ``shard_map``: makes all arrays vary over the mesh axes that any of them varies over.

    jnp functions do this by themselves; a custom call has to be given operands of one kind. Outside
    ``shard_map`` nothing happens.
    """
    varying = [_varying_axes(leaf) for leaf in jax.tree.leaves(tree)]
    every = frozenset[str]().union(*varying)
    if not every:
        return tree
    return jax.tree.map(lambda leaf: _vary(leaf, every - _varying_axes(leaf)), tree)


def _varying_axes(array: Any) -> frozenset[str]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _vary(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    return lax.pcast(array, tuple(sorted(axes)), to="varying") if axes else array


def on_mesh(
    body: Callable[..., jax.Array],
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[Any, ...],
    out_specs: PartitionSpec,
    *operands: Any,
) -> jax.Array:
    """``jax.shard_map``, with operands brought where ``in_specs`` want them on Explicit mesh axes too."""
    explicit = {
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    }

    def bring(spec: PartitionSpec, operand: Any) -> Any:
        return jax.tree.map(lambda array: _reshard(array, mesh, spec, explicit), operand)

    if explicit:
        operands = jax.tree.map(bring, in_specs, operands, is_leaf=lambda x: isinstance(x, PartitionSpec))
    y: jax.Array = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*operands)
    return y


def _reshard(array: Any, mesh: Mesh | AbstractMesh, spec: PartitionSpec, explicit: set[str]) -> Any:
    # The sharding in a type may name Explicit axes alone.
    entries = []
    for entry in spec:
        names = tuple(n for n in ((entry,) if isinstance(entry, str) else entry or ()) if n in explicit)
        entries.append(names or None)
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*entries)))


def _seen(array: Any) -> Seen | None:
    """The mesh and one spec entry per dimension, where JAX shows that an array is split over devices."""
    traced = isinstance(array, jax.core.Tracer)
    sharding = jax.typeof(array).sharding if traced else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    entries = (*sharding.spec, *[None] * (array.ndim - len(sharding.spec)))
    return (sharding.mesh, entries) if any(entry is not None for entry in entries) else None


def _entries(array: Any) -> tuple[Any, ...]:
    seen = _seen(array)
    return (None,) * array.ndim if seen is None else seen[1]


def _leading(arrays: Sequence[Any]) -> PartitionSpec:
    """How the first of ``arrays`` that is split along leading axes is."""
    for array in arrays:
        lead = _entries(array)[:-1]
        if any(entry is not None for entry in lead):
            return PartitionSpec(*lead)
    return PartitionSpec()


def _first_mesh(arrays: Sequence[Any]) -> Mesh | AbstractMesh | None:
    found: Iterator[Seen] = filter(None, map(_seen, arrays))
    return next((mesh for mesh, _ in found), None)


def _misplaced_reason(weights: Any, specs: Any) -> str | None:
    arrays = jax.tree.leaves(weights)
    expected = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    for array, spec in zip(arrays, expected, strict=True):
        entries = (*spec, *[None] * (array.ndim - len(spec)))
        if _seen(array) is not None and _entries(array) != entries:
            return f"an array of the weights is split by {PartitionSpec(*_entries(array))}, not {spec}"
    return None


def _warn(function: str, reason: str) -> None:
    warnings.warn(
        f"{function} can't keep its operands on their devices: {reason}. XLA gathers them whole on every "
        "device; see jax_w4a8.sharding for what can stay split",
        stacklevel=4,
    )


def observed_expert_sharding(
    function: str, tokens: Sequence[Any], experts: ExpertWeights
) -> ExpertSharding | None:
    """How operands are spread, by their own account; None when they are not, or can't be kept so.

    Inside ``jit`` only Explicit mesh axes can be seen. Warns when operands are spread in a way that
    ``shard_map`` here can't keep.

    Args:
      function: the caller's name, for the warning.
      tokens: arrays with the leading axes of x, x itself first.
      experts: packed weights.
    """
    mesh = _first_mesh([*tokens, *jax.tree.leaves(experts)])
    if mesh is None:
        return None
    expert_axis, tensor_axis = _entries(experts.w13.codes)[:2]
    try:
        sharding = ExpertSharding(mesh, expert_axis, tensor_axis, _leading(tokens))
        reason = sharding.unprepared_reason(experts) or _misplaced_reason(experts, sharding.specs(experts))
    except ValueError as error:
        reason = str(error)
    if reason is None and any(_entries(array)[-1] is not None for array in tokens):
        reason = f"x or its routing is split along its last axis, by {_entries(tokens[0])[-1]!r}"
    if reason is not None:
        _warn(function, reason)
        return None
    return sharding


def observed_token_sharding(function: str, tokens: Sequence[Any]) -> ExpertSharding | None:
    """As :func:`observed_expert_sharding`, for a function of tokens alone."""
    mesh = _first_mesh(tokens)
    if mesh is None:
        return None
    if any(_entries(array)[-1] is not None for array in tokens):
        _warn(function, f"one is split along its last axis, by {_entries(tokens[0])[-1]!r}")
        return None
    lead = min(array.ndim for array in tokens) - 1
    return ExpertSharding(mesh, tokens=PartitionSpec(*_leading(tokens)[:lead]))


def observed_linear_sharding(x: Any, weights: LinearWeights) -> LinearSharding | None:
    """As :func:`observed_expert_sharding`, for ``linear``."""
    mesh = _first_mesh([x, *jax.tree.leaves(weights)])
    if mesh is None:
        return None
    out_axis, groups, nbytes = _entries(weights.codes)
    in_axis = nbytes if weights.group_size == CHANNELWISE else groups
    try:
        sharding = LinearSharding(mesh, out_axis, in_axis, _leading([x]))
        reason = sharding.unprepared_reason(weights) or _misplaced_reason(weights, sharding.specs(weights))
    except ValueError as error:
        reason = str(error)
    if reason is None and _entries(x)[-1] not in (None, in_axis):
        reason = f"x is split along its inputs by {_entries(x)[-1]!r}, the weights are not"
    if reason is not None:
        _warn("linear", reason)
        return None
    return sharding
