"""The native backend: one JAX primitive per operation, lowered to a custom call on CPU.

On other platforms the same primitive lowers to the pure-JAX backend, so that a program traced here runs, or
is exported, anywhere. A primitive's operands are canonical (see :class:`Backend`), weights flattened.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_w4a8 import ffi
from jax_w4a8.experts.base import ACTIVATIONS, Backend, ExpertOptions
from jax_w4a8.experts.batching import batch
from jax_w4a8.experts.xla import XLAExperts
from jax_w4a8.weights import ExpertWeights, LinearWeights


def _options_attributes(options: ExpertOptions) -> dict[str, Any]:
    activation = options.activation
    limit = math.inf if activation.limit is None else float(activation.limit)
    return {
        "activation": ffi.attribute(ACTIVATIONS.index(activation.kind)),
        "alpha": ffi.attribute(float(activation.alpha)),
        "limit": ffi.attribute(limit),
        "symmetric": ffi.attribute(options.activation_scheme == "symmetric"),
        "weight_on_input": ffi.attribute(options.apply_router_weight_on_input),
    }


def define_operation(
    operation: str,
    abstract_eval: Callable[..., Any],
    reference: Callable[..., jax.Array],
    attributes: Callable[..., dict[str, Any]],
) -> Primitive:
    """A primitive with its abstract evaluation, its lowerings and its eager implementation."""
    primitive = Primitive(f"w4a8_{operation}")
    primitive.def_abstract_eval(abstract_eval)

    def lower_to_custom_call(context: Any, *operands: Any, **parameters: Any) -> Any:
        return ffi.lowering(operation)(context, *operands, **attributes(**parameters))

    mlir.register_lowering(primitive, mlir.lower_fun(reference, multiple_results=False))
    if ffi.native_available():
        mlir.register_lowering(primitive, lower_to_custom_call, platform="cpu")

    @functools.cache
    def compiled(**parameters: Any) -> Callable[..., jax.Array]:
        return jax.jit(functools.partial(primitive.bind, **parameters))

    def run(*operands: jax.Array, **parameters: Any) -> jax.Array:
        with jax.disable_jit(False):  # a custom call runs compiled or not at all
            return compiled(**parameters)(*operands)

    primitive.def_impl(run)
    return primitive


def batch_by_tokens(primitive: Primitive, token_operands: int) -> None:
    """Registers the batching rule; the first ``token_operands`` operands have a leading token axis."""

    def rule(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        by_token = [i < token_operands for i in range(len(operands))]
        return batch(functools.partial(primitive.bind, **params), operands, dims, by_token)

    batching.primitive_batchers[primitive] = rule


def _experts_parameters(experts: ExpertWeights, options: ExpertOptions) -> dict[str, Any]:
    return {"structure": jax.tree.structure(experts), "options": options}


def _fused_reference(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    *leaves: jax.Array,
    structure: Any,
    options: ExpertOptions,
) -> jax.Array:
    experts = jax.tree.unflatten(structure, leaves)
    return XLAExperts.fused_experts(x, weights, ids, experts, options)


def _apply_reference(
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    *leaves: jax.Array,
    structure: Any,
    options: ExpertOptions,
) -> jax.Array:
    experts = jax.tree.unflatten(structure, leaves)
    on_input = weights if options.apply_router_weight_on_input else None
    return XLAExperts.apply_experts(x, on_input, ids, experts, options)


def _linear_reference(x: jax.Array, *leaves: jax.Array, structure: Any, activation_scheme: str) -> jax.Array:
    return XLAExperts.linear(x, jax.tree.unflatten(structure, leaves), activation_scheme)


def _grouped_linear_reference(
    x: jax.Array, ids: jax.Array, *leaves: jax.Array, structure: Any, activation_scheme: str
) -> jax.Array:
    return XLAExperts.grouped_linear(x, ids, jax.tree.unflatten(structure, leaves), activation_scheme)


def _linear_attributes(structure: Any, activation_scheme: str) -> dict[str, Any]:
    return {"symmetric": ffi.attribute(activation_scheme == "symmetric")}


def _linear_shape(x: Any, *leaves: Any, structure: Any, activation_scheme: str) -> Any:
    weights: LinearWeights = jax.tree.unflatten(structure, leaves)
    return x.update(shape=(x.shape[0], weights.out_features))


fused_experts_p = define_operation(
    "fused_experts",
    lambda x, weights, ids, *leaves, structure, options: x.update(),
    _fused_reference,
    lambda structure, options: _options_attributes(options),
)
apply_experts_p = define_operation(
    "apply_experts",
    lambda x, weights, ids, *leaves, structure, options: x.update(
        shape=(*ids.shape, x.shape[1]), dtype=jnp.dtype(jnp.float32)
    ),
    _apply_reference,
    lambda structure, options: _options_attributes(options),
)
combine_p = define_operation(
    "combine",
    lambda slots, weights, dtype: slots.update(
        shape=(slots.shape[0], slots.shape[2]), dtype=jnp.dtype(dtype)
    ),
    lambda slots, weights, dtype: XLAExperts.combine(slots, weights, dtype),
    lambda dtype: {},
)
linear_p = define_operation(
    "linear",
    _linear_shape,
    _linear_reference,
    _linear_attributes,
)
grouped_linear_p = define_operation(
    "grouped_linear",
    lambda x, ids, *leaves, **parameters: _linear_shape(x, *leaves, **parameters),
    _grouped_linear_reference,
    _linear_attributes,
)
batch_by_tokens(fused_experts_p, 3)
batch_by_tokens(apply_experts_p, 3)
batch_by_tokens(combine_p, 2)
batch_by_tokens(linear_p, 1)
batch_by_tokens(grouped_linear_p, 2)


class CPUExpertsInt4(Backend):
    """The native kernels, on CPU."""

    name = "cpu_int4"

    @classmethod
    def unavailable_reason(cls, platform: str) -> str | None:
        """See :meth:`Backend.unavailable_reason`."""
        if platform != "cpu":
            return f"the native kernels run on platform 'cpu', not {platform!r}"
        return ffi.unavailable_reason()

    @classmethod
    def fused_experts(
        cls,
        x: jax.Array,
        weights: jax.Array,
        ids: jax.Array,
        experts: ExpertWeights,
        options: ExpertOptions,
    ) -> jax.Array:
        """See :meth:`Backend.fused_experts`."""
        leaves = jax.tree.leaves(experts)
        parameters = _experts_parameters(experts, options)
        return fused_experts_p.bind(x, weights, ids, *leaves, **parameters)

    @classmethod
    def apply_experts(
        cls,
        x: jax.Array,
        weights: jax.Array | None,
        ids: jax.Array,
        experts: ExpertWeights,
        options: ExpertOptions,
    ) -> jax.Array:
        """See :meth:`Backend.apply_experts`."""
        if weights is None:
            weights = jnp.zeros(ids.shape, jnp.float32)  # an operand that the handler doesn't read
        leaves = jax.tree.leaves(experts)
        parameters = _experts_parameters(experts, options)
        return apply_experts_p.bind(x, weights, ids, *leaves, **parameters)

    @classmethod
    def combine(cls, slots: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
        """See :meth:`Backend.combine`."""
        return combine_p.bind(slots, weights, dtype=jnp.dtype(dtype))

    @classmethod
    def linear(cls, x: jax.Array, weights: LinearWeights, activation_scheme: str) -> jax.Array:
        """See :meth:`Backend.linear`."""
        return linear_p.bind(
            x,
            *jax.tree.leaves(weights),
            structure=jax.tree.structure(weights),
            activation_scheme=activation_scheme,
        )

    @classmethod
    def grouped_linear(
        cls, x: jax.Array, ids: jax.Array, weights: LinearWeights, activation_scheme: str
    ) -> jax.Array:
        """See :meth:`Backend.grouped_linear`."""
        return grouped_linear_p.bind(
            x,
            ids,
            *jax.tree.leaves(weights),
            structure=jax.tree.structure(weights),
            activation_scheme=activation_scheme,
        )
