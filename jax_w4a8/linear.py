"""The dense linear layer on packed INT4 weights."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_w4a8.experts.base import Backend, check_activation_scheme, check_tokens
from jax_w4a8.experts.gradients import call_linear
from jax_w4a8.oracle import resolve_backend
from jax_w4a8.sharded_calls import observed_linear_sharding, on_mesh, vary_together
from jax_w4a8.sharding import LinearSharding
from jax_w4a8.weights import LinearWeights


def _linear(
    x: jax.Array, weights: LinearWeights, backend: type[Backend], activation_scheme: str
) -> jax.Array:
    """Any leading axes of x."""
    weights.check("weights", ())
    x, weights = vary_together((x, weights))
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = call_linear(backend, rows, weights, activation_scheme)
    return y.reshape(*x.shape[:-1], weights.out_features)


@functools.partial(jax.jit, static_argnames=("backend", "activation_scheme", "sharding"))
def _linear_on_mesh(
    x: jax.Array,
    weights: LinearWeights,
    *,
    backend: type[Backend],
    activation_scheme: str,
    sharding: LinearSharding,
) -> jax.Array:
    def body(x: jax.Array, weights: LinearWeights) -> jax.Array:
        weights = sharding.local(weights)
        if not sharding.reduced_axes:
            return _linear(x, weights, backend, activation_scheme)
        part = _linear(x.astype(jnp.float32), weights, backend, activation_scheme)
        return lax.psum(part, sharding.reduced_axes).astype(x.dtype)

    in_specs = (sharding.token_spec(x.ndim, sharding.in_axis), sharding.specs(weights))
    return on_mesh(body, sharding.mesh, in_specs, sharding.token_spec(x.ndim, sharding.out_axis), x, weights)


def linear(
    x: ArrayLike,
    weights: LinearWeights,
    *,
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
    sharding: LinearSharding | None = None,
) -> jax.Array:
    """``x @ W.T + bias`` with INT4 weights and INT8 activations.

    Args:
      x: ``[..., K]``, float32, bfloat16 or float16.
      weights: packed weights without leading axes (:func:`jax_w4a8.pack_linear`).
      activation_scheme: ``asymmetric`` or ``symmetric`` INT8 quantisation of each row.
      backend: ``auto``, ``cpu_int4`` (native) or ``xla`` (pure JAX).
      sharding: how the call is spread over a mesh (:mod:`jax_w4a8.sharding`); None for as its operands are,
        where JAX shows that.

    Returns:
      ``[..., N]`` in the dtype of ``x``; differentiable in reverse mode, as docs/transforms.md says.

    Raises:
      TypeError, ValueError: an argument has the wrong type, dtype, shape or value, or the backend asked for
        can't run here.
    """
    if not isinstance(weights, LinearWeights):
        raise TypeError(
            f"weights must be LinearWeights (see jax_w4a8.pack_linear), got {type(weights).__name__}"
        )
    if weights.codes.ndim != 3:
        raise ValueError(
            f"weights must have no leading axes (codes [NB, G, bytes]), got {weights.codes.shape}"
        )
    check_activation_scheme(activation_scheme)
    array = check_tokens(x, weights.in_features)
    packed: LinearWeights = jax.tree.map(jnp.asarray, weights)
    chosen = resolve_backend(backend)
    sharding = _check_sharding(sharding, array, packed)
    if sharding is None:
        return _linear(array, packed, chosen, activation_scheme)
    y: jax.Array = _linear_on_mesh(
        array, packed, backend=chosen, activation_scheme=activation_scheme, sharding=sharding
    )
    return y


def _check_sharding(
    sharding: LinearSharding | None, x: jax.Array, weights: LinearWeights
) -> LinearSharding | None:
    """Where the call runs, as asked for or as its operands show; the weights fit it."""
    if sharding is None:
        return observed_linear_sharding(x, weights)
    if not isinstance(sharding, LinearSharding):
        raise TypeError(f"sharding must be a LinearSharding or None, got {type(sharding).__name__}")
    sharding.check(weights)
    sharding.check_tokens(x.shape[:-1])
    reason = sharding.unprepared_reason(weights)
    if reason is not None:
        raise ValueError(reason)
    return sharding
