"""Packing on the host: the native extension fills blocks of numpy arrays, on several threads.

``xla_ffi/pack.h`` is the C++ side; ``weights.py`` says what goes where, and has the same in numpy for
machines without the extension.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_w4a8.quantization import QuantizedTensor, QuantizedWords
from jax_w4a8.threads import Workers

try:
    from jax_w4a8 import _native
except ImportError:
    _native = None  # type: ignore[assignment]
if not hasattr(_native, "pack_codes"):  # built from other sources than these
    _native = None  # type: ignore[assignment]

BLOCK_CHANNELS = 16
#: Packed bytes of one call: long enough to be worth a thread's while, short enough to share a matrix out.
_CALL_BYTES = 1 << 20

#: What weights are packed from: one code to a byte, eight codes to a word, or floats to be quantised.
Source = QuantizedTensor | QuantizedWords | np.ndarray[Any, Any]


class Blocks(NamedTuple):
    """Packed arrays of one matrix to be filled, or a slice of its blocks; see ``LinearWeights``."""

    codes: np.ndarray[Any, Any]
    scale: np.ndarray[Any, Any]
    scaled_sum: np.ndarray[Any, Any]
    bias: np.ndarray[Any, Any]

    def at(self, index: Any) -> Blocks:
        """The same with ``index`` applied to every array."""
        return Blocks(*(array[index] for array in self))


@dataclasses.dataclass(frozen=True)
class Job:
    """A matrix and where it goes.

    Attributes:
      source: ``[N, K]``; arrays may be numpy or jax arrays on CPU, of any strides.
      bias: ``[N]`` or None for zeros.
      blocks: arrays with one block for every 16 of N.
      in_features: K.
    """

    source: Source
    bias: Any
    blocks: Blocks
    in_features: int

    def calls(self) -> Iterator[Callable[[], bool]]:
        """What has to be called, each once, in any order and at the same time; False means a bad value."""
        yield self._fill_bias
        count = self.blocks.codes.shape[0]
        step = max(1, _CALL_BYTES // math.prod(self.blocks.codes.shape[1:]))
        for begin in range(0, count, step):
            yield functools.partial(self._fill, slice(begin, min(begin + step, count)))

    def _fill_bias(self) -> bool:
        blocks = self.blocks.bias
        bias = np.zeros(blocks.size, np.float32)
        if self.bias is not None:
            given = np.asarray(self.bias)
            bias[: given.size] = given
        blocks[...] = bias.reshape(blocks.shape)
        return True

    def _fill(self, which: slice) -> bool:
        rows = slice(which.start * BLOCK_CHANNELS, which.stop * BLOCK_CHANNELS)
        part = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], self.source)
        codes, scale, scaled_sum, _ = self.blocks.at(which)
        target: tuple[Any, ...] = (self.in_features, codes, _bits(scale), scale.dtype.name, scaled_sum)
        if isinstance(part, QuantizedTensor):
            given = part.codes if part.codes.dtype == np.int8 else part.codes.astype(np.int8)
            return _native.pack_codes(_dense(given), *_named(part.scale), *target)
        if isinstance(part, QuantizedWords):
            return _native.pack_words(_dense(part.words), *_named(part.scale), *target)
        if part.dtype.name not in ("float32", "bfloat16", "float16"):
            part = part.astype(np.float32)
        return _native.pack_floats(*_named(part), *target)


def _dense(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same rows at an address that their dtype likes, elements of a row side by side."""
    if rows.flags.aligned and rows.strides[-1] == rows.itemsize:
        return rows
    return rows.copy(order="C")


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """16-bit floats as their bit patterns."""
    return array if array.dtype == np.float32 else array.view(np.uint16)


def _named(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
    return _bits(_dense(array)), array.dtype.name


def run(jobs: Iterable[Job], workers: Workers | None = None) -> bool:
    """Fills the blocks of all jobs; False if a code is out of range, or a scale or weight isn't finite.

    Args:
      jobs: their blocks don't overlap.
      workers: threads to use; None starts some for this call.
    """
    listed = list(jobs)
    calls = [call for job in listed for call in job.calls()]
    if workers is not None:
        return all(workers.run(calls))
    small = sum(job.blocks.codes.nbytes for job in listed) <= _CALL_BYTES
    with Workers(1 if small else None) as workers:
        return all(workers.run(calls))


def runs_on_host(tree: Any) -> bool:
    """Whether all arrays of a pytree can be packed here: in host memory, and with the extension there."""
    return _native is not None and all(_in_host_memory(leaf) for leaf in jax.tree.leaves(tree))


def _in_host_memory(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    if isinstance(leaf, jax.Array):
        devices = leaf.devices()
        return len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return isinstance(leaf, np.ndarray)
