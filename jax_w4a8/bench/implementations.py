"""What every way of running a layer offers, whether it is ours, pure JAX or a peer."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8 import ffi
from jax_w4a8.bench.work import Array, Round, Work
from jax_w4a8.linear import linear
from jax_w4a8.moe import fused_experts
from jax_w4a8.weights import ExpertWeights, LinearWeights

#: A function of x, router weights, ids and one layer's weights.
Apply = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


class Loaded(abc.ABC):
    """An implementation with its weights in place.

    Attributes:
      name: for tables.
      variant: what there is to know besides, such as an instruction set or a weight format.
    """

    name: str
    variant: str = ""
    #: Layers that it holds: the first ones of those given.
    num_layers: int

    @abc.abstractmethod
    def prepare(self, inputs: Round) -> Callable[[], None]:
        """Puts inputs where they are needed; the function returned, which is timed, runs them all."""

    @abc.abstractmethod
    def first_output(self, inputs: Round) -> Array:
        """float32 ``[T, N]``: what the first layer makes of them."""

    def close(self) -> None:  # noqa: B027
        """Gives memory back."""


class Implementation(abc.ABC):
    """A way of running layers, before it has any.

    Attributes:
      name: by which the command line knows it.
      summary: one line for tables and help.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    #: Whether it takes over all layers that it is given, or the first one alone.
    holds_all: ClassVar[bool] = True

    @abc.abstractmethod
    def refusal(self, work: Work, threads: int) -> str | None:
        """Why it can't do ``work`` on so many threads, or None."""

    @abc.abstractmethod
    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """Takes over our packed ``layers``, in its own format."""

    def bytes_per_layer(self, work: Work) -> float:
        """Memory that one layer takes in its own format, roughly."""
        return float(work.layer_bytes)


def apply_ours(x: jax.Array, weights: jax.Array, ids: jax.Array, layer: Any, backend: str) -> jax.Array:
    """The layer by this package."""
    if isinstance(layer, ExpertWeights):
        return fused_experts(x, weights, ids, layer, backend=backend)
    if isinstance(layer, LinearWeights):
        return linear(x, layer, backend=backend)
    raise TypeError(f"layer must be ExpertWeights or LinearWeights, got {type(layer).__name__}")


def _over_layers(apply: Apply) -> Callable[..., jax.Array]:
    """One program of as many steps as a round has, as a model's; each waits for the one before."""

    def run(
        x: jax.Array, weights: Sequence[jax.Array], ids: Sequence[jax.Array], layers: Sequence[Any]
    ) -> jax.Array:
        y = apply(x, weights[0], ids[0], layers[0])
        for step in range(1, len(ids)):
            corner = x[:1, :1] + 1e-30 * y[:1, :1]
            x = lax.dynamic_update_slice(x, corner, (0, 0))
            y = apply(x, weights[step], ids[step], layers[step % len(layers)])
        return y

    return jax.jit(run)


class JaxLoaded(Loaded):
    """An implementation that is a JAX function."""

    def __init__(self, name: str, apply: Apply, layers: Sequence[Any], variant: str = "") -> None:
        self.name = name
        self.variant = variant
        self._layers = tuple(layers)
        self.num_layers = len(self._layers)
        self._run = _over_layers(apply)
        self._one = jax.jit(apply)

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        arguments = jax.device_put((inputs.x, inputs.weights, inputs.ids))
        arguments = (*jax.block_until_ready(arguments), self._layers)

        def run() -> None:
            jax.block_until_ready(self._run(*arguments))

        return run

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        arguments = (jnp.asarray(a) for a in (inputs.x, inputs.weights[0], inputs.ids[0]))
        y: Array = jax.device_get(self._one(*arguments, self._layers[0]))
        return y


class _NativeLoaded(JaxLoaded):
    """This package's kernel on one instruction set and a number of threads."""

    def __init__(self, layers: Sequence[Any], instruction_set: str, threads: int) -> None:
        super().__init__(
            "cpu_int4", lambda x, w, i, layer: apply_ours(x, w, i, layer, "cpu_int4"), layers, instruction_set
        )
        self._threads = threads

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        run = super().prepare(inputs)

        def limited() -> None:
            with ffi.using_instruction_set(self.variant), ffi.thread_limit(self._threads):
                run()

        return limited


class Native(Implementation):
    """This package's native backend."""

    name = "cpu_int4"
    summary = "this package's kernel"

    def __init__(self, instruction_set: str | None = None) -> None:
        self.instruction_set = instruction_set or ffi.instruction_set() or ""

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        return None

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`; the layers are ours already."""
        return _NativeLoaded(layers, self.instruction_set, threads)

    def bytes_per_layer(self, work: Work) -> float:
        """Nothing beside what is there."""
        return 0.0
