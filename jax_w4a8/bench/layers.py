"""One MoE layer, from x to y, beside the machine's limits measured in the same breath."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.random_weights import random_experts as random_experts
from jax_w4a8.bench.shapes import LayerShape
from jax_w4a8.moe import fused_experts
from jax_w4a8.weights import ExpertWeights, unpack_experts

ROUTINGS = ("uniform", "zipf", "one")


def random_ids(shape: LayerShape, tokens: int, routing: str, rng: np.random.Generator) -> Any:
    """int32 ``[tokens, k]``, distinct within a token: all experts alike, by Zipf's law, or the same k."""
    experts, k = shape.num_experts, shape.top_k
    if routing == "one":
        return np.broadcast_to(np.arange(k, dtype=np.int32), (tokens, k)).copy()
    weight = np.ones(experts) if routing == "uniform" else 1 / np.arange(1, experts + 1)
    # The k largest of exponential races: a draw without replacement by weight.
    races = rng.exponential(size=(tokens, experts)) / weight
    return np.argsort(races, axis=1)[:, :k].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Something that runs the layer.

    Attributes:
      name: in the results.
      prepare: turns our layers into what ``call`` takes as its last argument, one for each.
      call: jitted, of x, router weights, ids and weights.
    """

    name: str
    prepare: Callable[[Sequence[ExpertWeights]], Sequence[Any]]
    call: Callable[..., jax.Array]


def _with_backend(backend: str) -> Implementation:
    return Implementation(
        backend,
        lambda layers: layers,
        jax.jit(lambda x, w, ids, experts: fused_experts(x, w, ids, experts, backend=backend)),
    )


def _dequantized(layers: Sequence[ExpertWeights]) -> list[tuple[jax.Array, jax.Array]]:
    """float32 ``[E, H, 2I]`` and ``[E, I, H]`` of the first layer alone: they take eight times the room."""
    w13, w2, *_ = jax.jit(unpack_experts)(layers[0])
    transpose = jax.jit(lambda w: jnp.swapaxes(w.dequantize(), -1, -2))
    return [(transpose(w13), transpose(w2))]


@jax.jit
def _ragged_dot_layer(x: jax.Array, weights: jax.Array, ids: jax.Array, matrices: Any) -> jax.Array:
    """What people write first: rows sorted by expert, ``jax.lax.ragged_dot``, rows put back."""
    w13, w2 = matrices
    tokens, k = ids.shape
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=w13.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(jax.lax.ragged_dot(x[order // k], w13, sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w2, sizes)
    slots = jnp.zeros_like(y).at[order].set(y).reshape(tokens, k, -1)
    return jnp.einsum("tkh,tk->th", slots, weights)


NATIVE = _with_backend("cpu_int4")
BASELINES = {
    "xla": _with_backend("xla"),
    "ragged_dot": Implementation("ragged_dot", _dequantized, _ragged_dot_layer),
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Medians over repetitions; shares are of limits measured in turn with the work."""

    implementation: str
    tokens: int
    routing: str
    milliseconds: float
    gmacs: float
    share_of_peak: float
    gbytes: float
    share_of_bandwidth: float
    peak_gmacs: float
    bandwidth_gbytes: float

    @property
    def share_of_bound(self) -> float:
        """Share of the tighter of the two limits: the time it alone would take, over the time taken."""
        return max(self.share_of_peak, self.share_of_bandwidth)


class LayerBench:
    """Layers of one shape, differing byte for byte, taken in turn so that few tokens meet cold weights."""

    def __init__(self, shape: LayerShape, group_size: int, layers: int) -> None:
        self.shape = shape
        self.layers = [random_experts(shape, group_size, seed) for seed in range(layers)]
        self._expert_bytes = self.layers[0].nbytes / shape.num_experts

    def _inputs(self, weights: Sequence[Any], tokens: int, routing: str) -> Iterator[tuple[Any, int]]:
        """Endless ((x, router weights, ids, one of ``weights``), experts that ids name)."""
        rng = np.random.default_rng(tokens)
        k = self.shape.top_k
        x = jnp.asarray(rng.standard_normal((tokens, self.shape.hidden_size), np.float32))
        router_weights = jnp.full((tokens, k), 1 / k, jnp.float32)
        while True:
            for one in weights:
                ids = random_ids(self.shape, tokens, routing, rng)
                yield (x, router_weights, jnp.asarray(ids), one), len(np.unique(ids))

    def _time(self, call: Callable[..., jax.Array], arguments: tuple[Any, ...]) -> float:
        start = time.perf_counter()
        call(*arguments).block_until_ready()
        return time.perf_counter() - start

    def run(
        self,
        tokens: int,
        routing: str,
        limits: Limits,
        repetitions: int,
        implementation: Implementation | None = None,
    ) -> Measurement:
        """Takes the work, the peak and the bandwidth in turn, ``repetitions`` times.

        Bytes are those of our packed weights, whatever the implementation reads: they stand for the work.
        """
        implementation = implementation or NATIVE
        source = self._inputs(implementation.prepare(self.layers), tokens, routing)
        for _ in self.layers:
            self._time(implementation.call, next(source)[0])
        runs = [self._run_once(implementation.call, source, tokens, limits) for _ in range(repetitions)]
        seconds, compute, memory, peaks, bandwidths = (list(column) for column in zip(*runs, strict=True))
        return Measurement(
            implementation=implementation.name,
            tokens=tokens,
            routing=routing,
            milliseconds=1e3 * statistics.median(seconds),
            gmacs=statistics.median(compute) / 1e9,
            share_of_peak=_median_ratio(compute, peaks),
            gbytes=statistics.median(memory) / 1e9,
            share_of_bandwidth=_median_ratio(memory, bandwidths),
            peak_gmacs=statistics.median(peaks) / 1e9,
            bandwidth_gbytes=statistics.median(bandwidths) / 1e9,
        )

    def _run_once(
        self, call: Callable[..., jax.Array], source: Iterator[tuple[Any, int]], tokens: int, limits: Limits
    ) -> tuple[float, float, float, float, float]:
        """Median seconds, multiply-accumulates and bytes per second, peak and bandwidth."""
        taken, nbytes = [], []
        for _ in range(max(1, 64 // tokens)):
            arguments, experts = next(source)
            taken.append(self._time(call, arguments))
            nbytes.append(experts * self._expert_bytes + 2 * arguments[0].nbytes)
        middle = statistics.median(taken)
        macs = tokens * self.shape.macs_per_token
        return (
            middle,
            macs / middle,
            statistics.fmean(nbytes) / middle,
            limits.peak_macs(),
            limits.bandwidth(),
        )


def _median_ratio(values: Sequence[float], limits: Sequence[float]) -> float:
    return statistics.median(value / limit for value, limit in zip(values, limits, strict=True))
