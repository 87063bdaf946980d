"""Makes the operations of any backend differentiable in reverse mode, by a straight-through rule.

Forward, an operation is what the backend computes. Backward, it is the float model: weights are dequantised,
and the two quantisations of activations count as the identity. Tokens, router weights, biases and weight
scales have gradients, and only those that are asked for are computed; codes are integers and have none.
``scaled_sum`` is made of codes and scales: its part of the gradient is in that of the scales.

An operation is a primitive above the backends', with two more for its derivative: the tangent map, which
exists to be transposed and says so when forward mode would run it, and what it transposes to.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_w4a8 import ffi
from jax_w4a8.experts.backward import (
    Gradients,
    combine_gradients,
    experts_gradients,
    grouped_linear_gradients,
    linear_gradients,
)
from jax_w4a8.experts.base import Backend, ExpertOptions
from jax_w4a8.experts.batching import batch
from jax_w4a8.weights import ExpertWeights, LinearWeights

_NO_FORWARD_MODE = (
    "jax_w4a8 operations have no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): the rule for "
    "their quantised activations is a reverse-mode one. Use jax.grad, jax.vjp or jax.jacrev, or put "
    "jax.lax.stop_gradient around the operation's inputs"
)
_NO_SECOND_DERIVATIVE = (
    "jax_w4a8 operations have first derivatives alone: the straight-through rule of their gradients says "
    "nothing about the second (jax.hessian, jax.grad of jax.grad). Differentiate once, or put "
    "jax.lax.stop_gradient around the operation's inputs"
)
_LINEAR_LEAVES = ("codes", "scale", "scaled_sum", "bias")
_DIFFERENTIABLE_LEAVES = ("scale", "bias")


class Operation(abc.ABC):
    """What is static about a call. Subclasses are frozen dataclasses: equal ones share compiled programs."""

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of the operands, in order; leaves of weights last."""

    @property
    @abc.abstractmethod
    def token_operands(self) -> int:
        """How many operands have a leading token axis: the first ones."""

    @abc.abstractmethod
    def shape(self, *operands: Any) -> Any:
        """The abstract result, made of the first operand's so that it lives where that one does."""

    @abc.abstractmethod
    def forward(self, *operands: jax.Array) -> jax.Array:
        """What the backend computes."""

    @abc.abstractmethod
    def gradients(
        self, cotangent: jax.Array, operands: Sequence[jax.Array], wanted: Sequence[str]
    ) -> Gradients:
        """float32 gradients by name of operand."""

    def is_differentiable(self, name: str) -> bool:
        """Whether there is a gradient with respect to that operand."""
        _, dot, leaf = name.rpartition(".")
        return leaf in _DIFFERENTIABLE_LEAVES if dot else name != "ids"


@dataclasses.dataclass(frozen=True)
class _Experts(Operation):
    """The expert call: combined, or slot by slot; with router weights, or without."""

    backend: type[Backend]
    structure: Any
    options: ExpertOptions
    combined: bool
    weighted: bool

    @property
    def names(self) -> tuple[str, ...]:
        leaves = tuple(f"{side}.{leaf}" for side in ("w13", "w2") for leaf in _LINEAR_LEAVES)
        return ("x", "ids", *(("weights",) if self.weighted else ()), *leaves)

    @property
    def token_operands(self) -> int:
        return 2 + self.weighted

    def _unpack(
        self, operands: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array | None, jax.Array, ExpertWeights]:
        experts = jax.tree.unflatten(self.structure, operands[self.token_operands :])
        return operands[0], operands[2] if self.weighted else None, operands[1], experts

    def shape(self, *operands: Any) -> Any:
        x, ids = operands[:2]
        if self.combined:
            return x.update()
        return x.update(shape=(*ids.shape, x.shape[1]), dtype=jnp.dtype(jnp.float32))

    def forward(self, *operands: jax.Array) -> jax.Array:
        x, weights, ids, experts = self._unpack(operands)
        if self.combined and weights is not None:
            return self.backend.fused_experts(x, weights, ids, experts, self.options)
        return self.backend.apply_experts(x, weights, ids, experts, self.options)

    def gradients(
        self, cotangent: jax.Array, operands: Sequence[jax.Array], wanted: Sequence[str]
    ) -> Gradients:
        return experts_gradients(cotangent, *self._unpack(operands), self.options, wanted)


@dataclasses.dataclass(frozen=True)
class _Combine(Operation):
    backend: type[Backend]
    dtype: Any

    names = ("slots", "weights")
    token_operands = 2

    def shape(self, *operands: Any) -> Any:
        slots = operands[0]
        return slots.update(shape=(slots.shape[0], slots.shape[2]), dtype=self.dtype)

    def forward(self, *operands: jax.Array) -> jax.Array:
        slots, weights = operands
        return self.backend.combine(slots, weights, self.dtype)

    def gradients(
        self, cotangent: jax.Array, operands: Sequence[jax.Array], wanted: Sequence[str]
    ) -> Gradients:
        slots, weights = operands
        return combine_gradients(cotangent, slots, weights, wanted)


@dataclasses.dataclass(frozen=True)
class _Linear(Operation):
    backend: type[Backend]
    structure: Any
    activation_scheme: str

    names = ("x", *(f"weights.{leaf}" for leaf in _LINEAR_LEAVES))
    token_operands = 1

    def _weights(self, operands: Sequence[Any]) -> LinearWeights:
        weights: LinearWeights = jax.tree.unflatten(self.structure, operands[1:])
        return weights

    def shape(self, *operands: Any) -> Any:
        x = operands[0]
        return x.update(shape=(x.shape[0], self._weights(operands).out_features))

    def forward(self, *operands: jax.Array) -> jax.Array:
        return self.backend.linear(operands[0], self._weights(operands), self.activation_scheme)

    def gradients(
        self, cotangent: jax.Array, operands: Sequence[jax.Array], wanted: Sequence[str]
    ) -> Gradients:
        leaves = [name.rpartition(".")[2] for name in wanted]
        found = linear_gradients(cotangent, operands[0], self._weights(operands), leaves)
        return {name: found[leaf] for name, leaf in zip(wanted, leaves, strict=True)}


@dataclasses.dataclass(frozen=True)
class _GroupedLinear(Operation):
    backend: type[Backend]
    structure: Any
    activation_scheme: str

    names = ("x", "ids", *(f"weights.{leaf}" for leaf in _LINEAR_LEAVES))
    token_operands = 2

    def _weights(self, operands: Sequence[Any]) -> LinearWeights:
        weights: LinearWeights = jax.tree.unflatten(self.structure, operands[2:])
        return weights

    def shape(self, *operands: Any) -> Any:
        x = operands[0]
        return x.update(shape=(x.shape[0], self._weights(operands).out_features))

    def forward(self, *operands: jax.Array) -> jax.Array:
        x, ids, *_ = operands
        return self.backend.grouped_linear(x, ids, self._weights(operands), self.activation_scheme)

    def gradients(
        self, cotangent: jax.Array, operands: Sequence[jax.Array], wanted: Sequence[str]
    ) -> Gradients:
        leaves = [name.rpartition(".")[2] for name in wanted]
        x, ids, *_ = operands
        found = grouped_linear_gradients(cotangent, x, ids, self._weights(operands), leaves)
        return {name: found[leaf] for name, leaf in zip(wanted, leaves, strict=True)}


call_p = Primitive("w4a8_call")
tangent_p = Primitive("w4a8_tangent")
transpose_p = Primitive("w4a8_transpose")
transpose_p.multiple_results = True


def _refuse(message: str) -> Callable[..., Any]:
    def rule(*args: Any, **params: Any) -> Any:
        raise TypeError(message)

    return rule


# --- The operation itself.


def _call(*operands: Any, operation: Operation) -> jax.Array:
    return operation.forward(*operands)


def _call_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, operation: Operation) -> Any:
    y = call_p.bind(*primals, operation=operation)
    moving = tuple(
        name
        for name, tangent in zip(operation.names, tangents, strict=True)
        if type(tangent) is not ad.Zero and operation.is_differentiable(name)
    )
    if not moving:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    changes = [tangents[operation.names.index(name)] for name in moving]
    return y, tangent_p.bind(*primals, *changes, operation=operation, moving=moving)


def _call_batching(operands: Sequence[Any], dims: Sequence[Any], *, operation: Operation) -> Any:
    by_token = [i < operation.token_operands for i in range(len(operands))]
    return batch(functools.partial(call_p.bind, operation=operation), operands, dims, by_token)


call_p.def_impl(_call)
call_p.def_abstract_eval(lambda *operands, operation: operation.shape(*operands))
mlir.register_lowering(call_p, mlir.lower_fun(_call, multiple_results=False))
ad.primitive_jvps[call_p] = _call_jvp
batching.primitive_batchers[call_p] = _call_batching


# --- Its tangent map: linear in the last operands, the changes of those named ``moving``.


def _by_token(names: Sequence[str], operation: Operation) -> list[bool]:
    return [operation.names.index(name) < operation.token_operands for name in names]


def _tangent_batching(
    operands: Sequence[Any], dims: Sequence[Any], *, operation: Operation, moving: tuple[str, ...]
) -> Any:
    bind = functools.partial(tangent_p.bind, operation=operation, moving=moving)
    return batch(bind, operands, dims, _by_token((*operation.names, *moving), operation))


def _tangent_transpose(
    cotangent: Any, *operands: Any, operation: Operation, moving: tuple[str, ...]
) -> list[Any]:
    count = len(operation.names)
    primals, changes = operands[:count], operands[count:]
    wanted = tuple(
        name for name, change in zip(moving, changes, strict=True) if ad.is_undefined_primal(change)
    )
    if type(cotangent) is ad.Zero:
        return [None] * len(operands)
    found = transpose_p.bind(cotangent, *primals, operation=operation, wanted=wanted)
    by_name = dict(zip(wanted, found, strict=True))
    return [None] * count + [by_name.get(name) for name in moving]


tangent_p.def_impl(_refuse(_NO_FORWARD_MODE))
tangent_p.def_abstract_eval(
    lambda *operands, operation, moving: operation.shape(*operands[: len(operation.names)])
)
mlir.register_lowering(tangent_p, _refuse(_NO_FORWARD_MODE))
ad.primitive_jvps[tangent_p] = _refuse(_NO_FORWARD_MODE)
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batching


# --- Its transpose: the cotangent and the operands to the gradients of those named ``wanted``.


def _transpose(cotangent: Any, *operands: Any, operation: Operation, wanted: tuple[str, ...]) -> list[Any]:
    found = operation.gradients(cotangent, operands, wanted)
    return [found[name].astype(operands[operation.names.index(name)].dtype) for name in wanted]


@functools.cache
def _compiled_transpose(operation: Operation, wanted: tuple[str, ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(_transpose, operation=operation, wanted=wanted))


def _transpose_impl(*operands: Any, operation: Operation, wanted: tuple[str, ...]) -> Any:
    with jax.disable_jit(False):
        return _compiled_transpose(operation, wanted)(*operands)


def _transpose_shapes(
    cotangent: Any, *operands: Any, operation: Operation, wanted: tuple[str, ...]
) -> list[Any]:
    return [operands[operation.names.index(name)].update(weak_type=False) for name in wanted]


def _transpose_batching(
    operands: Sequence[Any], dims: Sequence[Any], *, operation: Operation, wanted: tuple[str, ...]
) -> Any:
    bind = functools.partial(transpose_p.bind, operation=operation, wanted=wanted)
    by_token = [True, *_by_token(operation.names, operation)]
    return batch(bind, operands, dims, by_token, foldable=all(_by_token(wanted, operation)))


transpose_p.def_impl(_transpose_impl)
transpose_p.def_abstract_eval(_transpose_shapes)
mlir.register_lowering(transpose_p, mlir.lower_fun(_transpose, multiple_results=True))
ad.primitive_jvps[transpose_p] = _refuse(_NO_SECOND_DERIVATIVE)
batching.primitive_batchers[transpose_p] = _transpose_batching


# --- What the functional layers call.


def _bind(operation: Operation, *operands: jax.Array) -> jax.Array:
    """Binds operands that vary over the same manual axes of a mesh, as operations of jnp make theirs do.

    A cast's transpose is the sum that gives an operand shared by all shards its whole gradient.
    """
    ffi.check_process()
    axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
    together = frozenset().union(*axes)
    if together:
        operands = tuple(
            lax.pcast(x, tuple(sorted(together - own)), to="varying") if together - own else x
            for x, own in zip(operands, axes, strict=True)
        )
    y: jax.Array = call_p.bind(*operands, operation=operation)
    return y


def call_fused_experts(
    backend: type[Backend],
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    experts: ExpertWeights,
    options: ExpertOptions,
) -> jax.Array:
    """:meth:`Backend.fused_experts`, differentiable."""
    leaves, structure = jax.tree.flatten(experts)
    operation = _Experts(backend, structure, options, combined=True, weighted=True)
    return _bind(operation, x, ids, weights, *leaves)


def call_apply_experts(
    backend: type[Backend],
    x: jax.Array,
    weights: jax.Array | None,
    ids: jax.Array,
    experts: ExpertWeights,
    options: ExpertOptions,
) -> jax.Array:
    """:meth:`Backend.apply_experts`, differentiable."""
    leaves, structure = jax.tree.flatten(experts)
    operation = _Experts(backend, structure, options, combined=False, weighted=weights is not None)
    weighting = () if weights is None else (weights,)
    return _bind(operation, x, ids, *weighting, *leaves)


def call_combine(backend: type[Backend], slots: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    """:meth:`Backend.combine`, differentiable."""
    return _bind(_Combine(backend, jnp.dtype(dtype)), slots, weights)


def call_linear(
    backend: type[Backend], x: jax.Array, weights: LinearWeights, activation_scheme: str
) -> jax.Array:
    """:meth:`Backend.linear`, differentiable."""
    leaves, structure = jax.tree.flatten(weights)
    return _bind(_Linear(backend, structure, activation_scheme), x, *leaves)


def call_grouped_linear(
    backend: type[Backend], x: jax.Array, ids: jax.Array, weights: LinearWeights, activation_scheme: str
) -> jax.Array:
    """:meth:`Backend.grouped_linear`, differentiable."""
    leaves, structure = jax.tree.flatten(weights)
    return _bind(_GroupedLinear(backend, structure, activation_scheme), x, ids, *leaves)
