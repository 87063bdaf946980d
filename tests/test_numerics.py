"""The numeric core against tests/reference.py, and the arithmetic faults that public systems had.

Names in brackets, as in [A11], are those of the project's list of known faults.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import Activation, MoEConfig, QuantizedTensor, Routing

from . import reference
from .reference import (
    BACKENDS,
    SCHEMES,
    Layer,
    assert_rows_close,
    assert_same_bits,
    in_process,
    on_device,
    random_batch,
    random_layer,
    random_weights,
    relative_error,
)

pytestmark = pytest.mark.skipif(
    not w4a8.native_available(), reason="there is no native backend here"
)
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
on_each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
STATIC = ("activation", "activation_scheme", "apply_router_weight_on_input", "backend")
fused_experts = jax.jit(w4a8.fused_experts, static_argnames=STATIC)
apply_experts = jax.jit(w4a8.apply_experts, static_argnames=STATIC)
linear = jax.jit(w4a8.linear, static_argnames=STATIC)
combine = jax.jit(w4a8.combine, static_argnames=("dtype", "backend"))

#: The backends agree to 1e-5; each is held to less, the native one to what float32 can do.
TOLERANCE = {"cpu_int4": 1e-6, "xla": 2e-6}


def packed_linear(weights, bias=None):
    return on_device(w4a8.pack_linear(weights, bias))


def ones(shape, scale, group_size=-1):
    """Weights whose codes are all 1."""
    return QuantizedTensor(np.ones(shape, np.int8), np.asarray(scale, np.float32), group_size)


def identity(size):
    return ones((size, size), np.ones((size, 1)))._replace_codes(np.eye(size, dtype=np.int8))


def sized_like_floats(rng, shape):
    """Normal numbers of all magnitudes that a product with a weight leaves finite."""
    return (rng.normal(size=shape) * 10.0 ** rng.uniform(-25, 30, (shape[0], 1))).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------
# Quantisation of activations, seen through an identity matrix.
