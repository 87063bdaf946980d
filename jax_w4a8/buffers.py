"""Host memory that JAX can take over without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

#: XLA's CPU client adopts host buffers that start at a multiple of this and copies others.
ALIGNMENT = 64


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised array that starts at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    array: np.ndarray[Any, Any] = raw[start : start + nbytes].view(dtype).reshape(shape)
    return array


def to_device(tree: Any) -> Any:
    """A pytree of numpy arrays as jax arrays; aligned ones aren't copied on CPU, so don't write to them."""
    return jax.tree.map(jax.device_put, tree)
