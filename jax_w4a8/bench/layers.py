"""One MoE layer, from x to y, beside the machine's limits measured in the same breath."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.shapes import LayerShape
from jax_w4a8.checkpoint.buffers import aligned_empty, to_device
from jax_w4a8.moe import fused_experts
from jax_w4a8.quantization import CHANNELWISE, num_groups
from jax_w4a8.weights import ExpertWeights, LinearWeights, num_blocks

ROUTINGS = ("uniform", "zipf", "one")


def _random_matrix(
    rng: np.random.Generator, experts: int, out_features: int, in_features: int, group_size: int
) -> LinearWeights:
    """Packed weights of random bytes: every byte is a valid pair of codes."""
    groups = num_groups(group_size, in_features)
    width = in_features if group_size == CHANNELWISE else group_size
    blocks = num_blocks(out_features)
    codes = aligned_empty((experts, blocks, groups, 8 * width), np.uint8)
    for expert in range(experts):
        codes[expert] = np.frombuffer(rng.bytes(codes[expert].size), np.uint8).reshape(
            codes.shape[1:]
        )
    scale_dtype = np.float32 if group_size == CHANNELWISE else ml_dtypes.bfloat16
    scale = rng.random((experts, blocks, groups, 16), np.float32) / (4.6 * math.sqrt(in_features))
    channels = (experts, blocks, 16)
    return LinearWeights(
        codes,
        scale.astype(scale_dtype),
        np.zeros(channels, np.float32),
        np.zeros(channels, np.float32),
        out_features,
        in_features,
        group_size,
    )


def random_experts(shape: LayerShape, group_size: int, seed: int) -> ExpertWeights:
    """Random packed weights of one layer, on the device without a copy."""
    rng = np.random.default_rng(seed)
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    w13 = _random_matrix(rng, experts, 2 * inner, hidden, group_size)
    w2 = _random_matrix(rng, experts, hidden, inner, group_size)
    return to_device(ExpertWeights(w13, w2))


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
class Measurement:
    """Medians over repetitions; shares are of limits measured in turn with the work."""

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
        self._layers = [random_experts(shape, group_size, seed) for seed in range(layers)]
        self._expert_bytes = self._layers[0].nbytes / shape.num_experts
        self._call = jax.jit(lambda x, w, ids, experts: fused_experts(x, w, ids, experts))

    def _inputs(self, tokens: int, routing: str) -> Iterator[tuple[Any, ...]]:
        """Endless (x, weights, ids, experts, bytes read)."""
        rng = np.random.default_rng(tokens)
        k = self.shape.top_k
        x = jnp.asarray(rng.standard_normal((tokens, self.shape.hidden_size), np.float32))
        weights = jnp.full((tokens, k), 1 / k, jnp.float32)
        while True:
            for experts in self._layers:
                ids = random_ids(self.shape, tokens, routing, rng)
                touched = len(np.unique(ids)) * self._expert_bytes
                activations = 4 * tokens * 2 * self.shape.hidden_size
                yield x, weights, jnp.asarray(ids), experts, touched + activations

    def _time(self, inputs: tuple[Any, ...]) -> float:
        start = time.perf_counter()
        self._call(*inputs[:4]).block_until_ready()
        return time.perf_counter() - start

    def run(self, tokens: int, routing: str, limits: Limits, repetitions: int) -> Measurement:
        """Takes the work, the peak and the bandwidth in turn, ``repetitions`` times."""
        source = self._inputs(tokens, routing)
        for _ in self._layers:
            self._time(next(source))
        seconds, peaks, bandwidths, compute, memory = [], [], [], [], []
        calls = max(1, 64 // tokens)
        for _ in range(repetitions):
            taken, nbytes = [], []
            for _ in range(calls):
                inputs = next(source)
                taken.append(self._time(inputs))
                nbytes.append(inputs[4])
            peaks.append(limits.peak_macs())
            bandwidths.append(limits.bandwidth())
            middle = statistics.median(taken)
            seconds.append(middle)
            compute.append(tokens * self.shape.macs_per_token / middle)
            memory.append(statistics.fmean(nbytes) / middle)
        share_of_peak = statistics.median(c / p for c, p in zip(compute, peaks, strict=True))
        share_of_bandwidth = statistics.median(
            m / b for m, b in zip(memory, bandwidths, strict=True)
        )
        return Measurement(
            tokens=tokens,
            routing=routing,
            milliseconds=1e3 * statistics.median(seconds),
            gmacs=statistics.median(compute) / 1e9,
            share_of_peak=share_of_peak,
            gbytes=statistics.median(memory) / 1e9,
            share_of_bandwidth=share_of_bandwidth,
            peak_gmacs=statistics.median(peaks) / 1e9,
            bandwidth_gbytes=statistics.median(bandwidths) / 1e9,
        )
