"""What peers share: whether they are installed, and our weights in the forms that they take."""

from __future__ import annotations

import abc
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a8.bench.implementations import Implementation, Loaded
from jax_w4a8.bench.work import Array, Round
from jax_w4a8.quantization import CHANNELWISE, QuantizedTensor
from jax_w4a8.weights import ExpertWeights, LinearWeights, unpack_experts, unpack_linear


class Peer(Implementation):
    """Another runtime.

    Attributes:
      modules: what must be importable.
      distribution: whose version is recorded.
      install: command lines that install it.
    """

    modules: ClassVar[tuple[str, ...]]
    distribution: ClassVar[str]
    install: ClassVar[str]

    def require(self) -> None:
        """Raises ImportError, with what to install, unless it can be imported."""
        missing = [name for name in self.modules if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(f"peer {self.name} needs {', '.join(missing)}: {self.install}")

    def version(self) -> str:
        """The installed version."""
        return importlib.metadata.version(self.distribution)


class LoadedTorchLayers(Loaded):
    """Layers of a runtime that is called layer by layer with torch tensors."""

    @abc.abstractmethod
    def calls(self, inputs: Round) -> tuple[Callable[[int], None], Any]:
        """A function that runs one step, by its number, and the tensor that it writes."""

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        call, _ = self.calls(inputs)

        def run() -> None:
            for step in range(inputs.steps):
                call(step)

        return run

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        call, out = self.calls(inputs)
        call(0)
        result: Array = out.float().numpy()
        return result


def projections(layer: Any) -> Sequence[QuantizedTensor]:
    """Codes and scales as before packing, in numpy: ``w13`` (gate first) and ``w2``, or a linear map's."""
    if isinstance(layer, ExpertWeights):
        w13, w2, *_ = jax.jit(unpack_experts)(layer)
        return [_on_host(w13), _on_host(w2)]
    if isinstance(layer, LinearWeights):
        return [_on_host(jax.jit(unpack_linear)(layer)[0])]
    raise TypeError(f"layer must be ExpertWeights or LinearWeights, got {type(layer).__name__}")


def _on_host(weights: QuantizedTensor) -> QuantizedTensor:
    host: QuantizedTensor = jax.tree.map(np.asarray, weights)
    return host


@jax.jit
def _pairs(codes: jax.Array) -> jax.Array:
    nibbles = (codes + 8).astype(jnp.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def pairs(codes: Array) -> Array:
    """int8 ``[..., K]`` to uint8 ``[..., K / 2]``: two codes plus 8 in a byte, the first in the low one."""
    return np.asarray(_pairs(codes))


def group_scales(weights: QuantizedTensor, group_size: int) -> Array:
    """float32 ``[..., N, K / group_size]``: each scale as often as a smaller group size asks."""
    scale = np.asarray(weights.scale, np.float32)
    inputs = weights.codes.shape[-1]
    own = inputs if weights.group_size == CHANNELWISE else weights.group_size
    return np.repeat(scale, own // group_size, axis=-1)[..., : inputs // group_size]


def even_groups(inputs: Sequence[int], group_size: int) -> bool:
    """Whether every group is full."""
    return group_size == CHANNELWISE or all(n % group_size == 0 for n in inputs)
