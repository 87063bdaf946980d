"""The dense linear layer on packed INT4 weights."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_w4a8.experts.base import check_activation_scheme, check_tokens
from jax_w4a8.experts.gradients import call_linear
from jax_w4a8.oracle import resolve_backend
from jax_w4a8.weights import LinearWeights


def linear(
    x: ArrayLike,
    weights: LinearWeights,
    *,
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
) -> jax.Array:
    """``x @ W.T + bias`` with INT4 weights and INT8 activations.

    Args:
      x: ``[..., K]``, float32, bfloat16 or float16.
      weights: packed weights without leading axes (:func:`jax_w4a8.pack_linear`).
      activation_scheme: ``asymmetric`` or ``symmetric`` INT8 quantisation of each row.
      backend: ``auto``, ``cpu_int4`` (native) or ``xla`` (pure JAX).

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
    weights.check("weights", ())
    check_activation_scheme(activation_scheme)
    array = check_tokens(x, weights.in_features)
    rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
    packed = jax.tree.map(jnp.asarray, weights)
    y = call_linear(resolve_backend(backend), rows, packed, activation_scheme)
    return y.reshape(*array.shape[:-1], weights.out_features)
