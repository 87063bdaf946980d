"""The functional MoE layer: routing, expert call, combine. Checks arguments, then hands on to a backend."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_w4a8.experts.base import (
    INPUT_DTYPES,
    Activation,
    ExpertOptions,
    check_tokens,
)
from jax_w4a8.experts.gradients import call_apply_experts, call_combine, call_fused_experts
from jax_w4a8.oracle import resolve_backend
from jax_w4a8.routing import Routing, route
from jax_w4a8.weights import ExpertWeights


def _check_ids(ids: ArrayLike, lead: tuple[int, ...], name: str = "ids") -> jax.Array:
    # Host integers may be wider than jax's: a wide id must not wrap round to a valid one on its way in.
    array = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer array, got {array.dtype}")
    if array.ndim != len(lead) + 1 or array.shape[:-1] != lead or array.shape[-1] < 1:
        raise ValueError(f"{name} must have shape {(*lead, 'k')}, k >= 1, got {array.shape}")
    if array.dtype.itemsize >= 4 and array.dtype != np.int32:
        limits = np.iinfo(np.int32)
        array = array.clip(max(limits.min, int(jnp.iinfo(array.dtype).min)), limits.max)
    return jnp.asarray(array, jnp.int32)


def _check_router_weights(weights: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    array = jnp.asarray(weights)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"weights must be a floating point array, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"weights must have the shape of ids, {shape}, got {array.shape}")
    return array.astype(jnp.float32)


def _check_experts(experts: ExpertWeights) -> ExpertWeights:
    if not isinstance(experts, ExpertWeights):
        raise TypeError(
            f"experts must be ExpertWeights (see jax_w4a8.pack_experts), got {type(experts).__name__}"
        )
    experts.check()
    packed: ExpertWeights = jax.tree.map(jnp.asarray, experts)
    return packed


def _options(
    activation: str | Activation, activation_scheme: str, apply_router_weight_on_input: bool, k: int
) -> ExpertOptions:
    if isinstance(activation, str):
        activation = Activation(activation)
    if not isinstance(activation, Activation):
        raise TypeError(f"activation must be a name or an Activation, got {activation!r}")
    if apply_router_weight_on_input and k != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {k}")
    return ExpertOptions(activation, activation_scheme, bool(apply_router_weight_on_input))


def fused_experts(
    x: ArrayLike,
    weights: ArrayLike,
    ids: ArrayLike,
    experts: ExpertWeights,
    *,
    activation: str | Activation = "silu",
    activation_scheme: str = "asymmetric",
    apply_router_weight_on_input: bool = False,
    backend: str = "auto",
) -> jax.Array:
    """Runs each token through its experts and adds their outputs up by router weight.

    Args:
      x: tokens ``[..., H]``, float32, bfloat16 or float16.
      weights: router weights ``[..., k]``, floating point; used in float32.
      ids: expert of each slot ``[..., k]``, integers; -1 adds nothing ("not on this shard"). Any other id
        outside [0, E) is an error of the native backend and a NaN row of the pure-JAX one.
      experts: packed weights (:func:`jax_w4a8.pack_experts`). Pass them as an argument of your jitted
        function: weights that it closes over become constants of the program.
      activation: ``silu``, ``swigluoai``, ``gelu``, ``gelu_tanh``, or an :class:`Activation`.
      activation_scheme: ``asymmetric`` or ``symmetric`` INT8 quantisation of each token.
      apply_router_weight_on_input: scale x by the router weight before the experts, instead of their output;
        needs k = 1.
      backend: ``auto``, ``cpu_int4`` (native) or ``xla`` (pure JAX).

    Returns:
      ``[..., H]`` in the dtype of ``x``. Reverse mode differentiates it with respect to x, weights, and the
      biases and scales of ``experts``, by the straight-through rule of docs/transforms.md.

    Raises:
      TypeError, ValueError: an argument has the wrong type, dtype, shape or value, or the backend asked for
        can't run here.
      jax.errors.JaxRuntimeError, ValueError: an expert id is out of range (native backend, at run time; which
        of the two depends on how JAX dispatched the call).
    """
    experts = _check_experts(experts)
    x = check_tokens(x, experts.hidden_size)
    ids = _check_ids(ids, x.shape[:-1])
    weights = _check_router_weights(weights, ids.shape)
    k = ids.shape[-1]
    options = _options(activation, activation_scheme, apply_router_weight_on_input, k)
    tokens = math.prod(x.shape[:-1])
    y = call_fused_experts(
        resolve_backend(backend),
        x.reshape(tokens, x.shape[-1]),
        weights.reshape(tokens, k),
        ids.reshape(tokens, k),
        experts,
        options,
    )
    return y.reshape(x.shape)


def apply_experts(
    x: ArrayLike,
    ids: ArrayLike,
    experts: ExpertWeights,
    *,
    weights: ArrayLike | None = None,
    activation: str | Activation = "silu",
    activation_scheme: str = "asymmetric",
    apply_router_weight_on_input: bool = False,
    backend: str = "auto",
) -> jax.Array:
    """Each slot's expert output before the combine: ``combine(apply_experts(...), weights, dtype=x.dtype)``
    equals :func:`fused_experts` bit for bit, for finite weights.

    Args:
      x, ids, experts, activation, activation_scheme, backend: as for :func:`fused_experts`.
      weights: router weights ``[..., k]``; needed exactly when ``apply_router_weight_on_input``.
      apply_router_weight_on_input: as for :func:`fused_experts`; the combine then takes ones.

    Returns:
      float32 ``[..., k, H]``; zeros for id -1.

    Raises:
      As :func:`fused_experts`.
    """
    experts = _check_experts(experts)
    x = check_tokens(x, experts.hidden_size)
    ids = _check_ids(ids, x.shape[:-1])
    k = ids.shape[-1]
    options = _options(activation, activation_scheme, apply_router_weight_on_input, k)
    if (weights is not None) != options.apply_router_weight_on_input:
        came = "None" if weights is None else "weights without it"
        raise ValueError(
            f"weights must be given exactly when apply_router_weight_on_input is set, got {came}"
        )
    tokens = math.prod(x.shape[:-1])
    if weights is not None:
        weights = _check_router_weights(weights, ids.shape).reshape(tokens, k)
    slots = call_apply_experts(
        resolve_backend(backend),
        x.reshape(tokens, x.shape[-1]),
        weights,
        ids.reshape(tokens, k),
        experts,
        options,
    )
    return slots.reshape(*ids.shape, x.shape[-1])


def combine(
    slots: ArrayLike,
    weights: ArrayLike,
    *,
    dtype: DTypeLike = np.float32,
    backend: str = "auto",
) -> jax.Array:
    """Adds slot outputs up by router weight, in float32, slots ascending, rounded once.

    Args:
      slots: float32 ``[..., k, H]``, as :func:`apply_experts` gives them.
      weights: floating point ``[..., k]``.
      dtype: of the result: float32, bfloat16 or float16.
      backend: as for :func:`fused_experts`.

    Returns:
      ``[..., H]`` of ``dtype``.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype or shape.
    """
    array = jnp.asarray(slots)
    if array.dtype != jnp.float32 or array.ndim < 2:
        raise TypeError(f"slots must be a float32 array [..., k, H], got {array.dtype} {array.shape}")
    result_dtype = jnp.dtype(dtype)
    if result_dtype not in INPUT_DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16 or float16, got {result_dtype}")
    weights = _check_router_weights(weights, array.shape[:-1])
    *lead, k, hidden = array.shape
    tokens = math.prod(lead)
    y = call_combine(
        resolve_backend(backend),
        array.reshape(tokens, k, hidden),
        weights.reshape(tokens, k),
        result_dtype,
    )
    return y.reshape(*lead, hidden)


def moe(
    x: ArrayLike,
    router_logits: ArrayLike,
    experts: ExpertWeights,
    routing: Routing,
    *,
    correction_bias: ArrayLike | None = None,
    activation: str | Activation = "silu",
    activation_scheme: str = "asymmetric",
    apply_router_weight_on_input: bool = False,
    backend: str = "auto",
) -> jax.Array:
    """A whole MoE layer: chooses experts, runs them, combines their outputs.

    Args:
      x: tokens ``[..., H]``, float32, bfloat16 or float16.
      router_logits: ``[..., E]``, best computed in float32.
      experts: packed weights (:func:`jax_w4a8.pack_experts`).
      routing: how experts are chosen and weighted (:class:`jax_w4a8.Routing`).
      correction_bias: float32 ``[E]``, added to the scores for the choice alone.
      activation, activation_scheme, apply_router_weight_on_input, backend: as for :func:`fused_experts`.

    Returns:
      ``[..., H]`` in the dtype of ``x``.

    Raises:
      As :func:`jax_w4a8.route` and :func:`fused_experts`.
    """
    experts = _check_experts(experts)
    x = check_tokens(x, experts.hidden_size)
    logits = jnp.asarray(router_logits)
    if logits.shape != (*x.shape[:-1], experts.num_experts):
        raise ValueError(
            f"router_logits must have shape {(*x.shape[:-1], experts.num_experts)}, got {logits.shape}"
        )
    weights, ids = route(logits, routing, correction_bias)
    return fused_experts(
        x,
        weights,
        ids,
        experts,
        activation=activation,
        activation_scheme=activation_scheme,
        apply_router_weight_on_input=apply_router_weight_on_input,
        backend=backend,
    )
