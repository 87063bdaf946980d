"""Host memory that JAX can take over without a copy."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

#: XLA's CPU client adopts host buffers that start at a multiple of this and copies others.
ALIGNMENT = 64
#: Size and alignment of a huge page.
_HUGE_PAGE = 2 << 20
#: Memory of this size and more is asked for in huge pages.
_LARGE = 2 * _HUGE_PAGE


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """An uninitialised array that starts at a multiple of 64 bytes, in huge pages if it is large.

    Packed weights are read from end to end in every call, and one page of 2 MiB takes one entry of the
    processor's address cache where 4 KiB pages take 512. Where the system has none to give, or won't, pages
    are small ones.

    Raises:
      MemoryError: there is no memory for it; the message has size, shape and dtype.
    """
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    large = nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE")
    try:
        raw = _huge_pages(nbytes) if large else np.empty(nbytes + ALIGNMENT, np.uint8)
    except (OSError, MemoryError) as error:  # mmap's, and numpy's, which has the size in bytes alone
        size = f"{nbytes / 2**20:,.0f} MiB, an array of shape {tuple(shape)} and dtype {dtype}"
        raise MemoryError(f"no memory for {size}") from error
    start = -raw.ctypes.data % ALIGNMENT
    array: np.ndarray[Any, Any] = raw[start : start + nbytes].view(dtype).reshape(shape)
    return array


def _huge_pages(nbytes: int) -> np.ndarray[Any, Any]:
    """uint8 ``[nbytes]`` that starts at a huge page's boundary; given back to the system when it goes.

    Only whole pages are asked for: a last one would take memory that nobody needs.
    """
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    with contextlib.suppress(OSError):  # the kernel was built without them
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // _HUGE_PAGE * _HUGE_PAGE)
    return raw[start : start + nbytes]


def to_device(tree: Any, device: jax.Device | None = None) -> Any:
    """A pytree of numpy arrays as jax arrays; aligned ones aren't copied on CPU, so don't write to them."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device), tree)
