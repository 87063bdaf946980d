"""Times implementations and the machine's limits in turn, so that both meet the same machine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_w4a8 import ffi
from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.work import Array, Round, Work, cosine, round_of

#: Tokens up to which a call is so short that a repetition takes several.
FEW_TOKENS = 16
_ROUNDS_OF_FEW = 3
#: A peer's threads go on spinning for some time after its call: what follows is timed after a rest.
REST_SECONDS = 0.02
#: Least cosine with our output of an implementation that does the same work; INT8 activations cost 0.0002.
_LEAST_COSINE = 0.99


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Medians over repetitions; shares are medians of ratios to limits measured just before and after.

    Attributes:
      implementation, variant: what ran.
      tokens, routing, threads: the case.
      layers: different layers taken in turn in one call.
      milliseconds: per layer.
      gmacs: 1e9 multiply-accumulates per second.
      share_of_peak: of the INT8 dot products in registers of ``peak_set`` on as many threads.
      gbytes: 1e9 bytes per second: our packed weights in use, x and y, each once, whatever it reads.
      share_of_bandwidth: of plain reads on as many threads.
      peak_gmacs, bandwidth_gbytes: medians of the limits.
      peak_set: instruction set of the peak.
      cosine: of the first layer's output with our own.
    """

    implementation: str
    variant: str
    tokens: int
    routing: str
    threads: int
    layers: int
    milliseconds: float
    gmacs: float
    share_of_peak: float
    gbytes: float
    share_of_bandwidth: float
    peak_gmacs: float
    bandwidth_gbytes: float
    peak_set: str
    cosine: float

    @property
    def bound(self) -> str:
        """Which limit is the tighter one: ``compute`` or ``memory``."""
        return "compute" if self.share_of_peak >= self.share_of_bandwidth else "memory"

    @property
    def share_of_bound(self) -> float:
        """Share of the tighter limit: the time that it alone would take, over the time taken."""
        return max(self.share_of_peak, self.share_of_bandwidth)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "bound": self.bound, "share_of_bound": self.share_of_bound}


@dataclasses.dataclass(frozen=True)
class _Sample:
    seconds: float
    macs: float
    nbytes: float
    peak: float
    bandwidth: float


class Bench:
    """Runs loaded implementations of one kind of work, taking turns.

    The first of them is ours: the others' outputs are compared with it.
    """

    def __init__(
        self, work: Work, loaded: Sequence[Loaded], layers: int, threads: int, limits: Limits
    ) -> None:
        self._work = work
        self._loaded = loaded
        self._layers = layers
        self._threads = threads
        self._limits = limits

    def run(self, tokens: int, routing: str, repetitions: int) -> list[Measurement]:
        """Measures every implementation.

        Raises:
          RuntimeError: an implementation's output isn't that of the same layer.
        """
        rng = np.random.default_rng(tokens)
        inputs = self._work.round(tokens, self._layers, routing, rng)
        reference = self._loaded[0].first_output(inputs)
        cosines = [self._check(one, inputs, reference) for one in self._loaded]
        for one in self._loaded:
            one.prepare(round_of(inputs, range(one.num_layers)))()
        samples: list[list[_Sample]] = [[] for _ in self._loaded]
        for _ in range(repetitions * (_ROUNDS_OF_FEW if tokens <= FEW_TOKENS else 1)):
            inputs = self._work.round(tokens, self._layers, routing, rng)
            for one, found in zip(self._loaded, samples, strict=True):
                found.append(self._sample(one, inputs))
            self._limits.sample(self._threads)
        return [
            self._measurement(*parts, tokens, routing)
            for parts in zip(self._loaded, cosines, samples, strict=True)
        ]

    def _check(self, one: Loaded, inputs: Round, reference: Array) -> float:
        found = cosine(one.first_output(inputs), reference)
        if not found > _LEAST_COSINE:
            raise RuntimeError(
                f"{one.name} {one.variant} doesn't compute the same layer: cosine {found:.4f} with ours"
            )
        return found

    def _sample(self, one: Loaded, inputs: Round) -> _Sample:
        inputs = round_of(inputs, range(one.num_layers))
        run = one.prepare(inputs)
        time.sleep(REST_SECONDS)
        bandwidth = self._limits.bandwidth(self._threads)
        start = time.perf_counter()
        run()
        seconds = (time.perf_counter() - start) / inputs.layers
        peak = self._limits.peak_macs(self._threads, self._peak_set(one))
        macs = inputs.tokens * self._work.macs_per_token
        return _Sample(seconds, macs / seconds, self._work.bytes_touched(inputs) / seconds, peak, bandwidth)

    def _peak_set(self, one: Loaded) -> str | None:
        """Peers choose for themselves, so they are compared with the same peak as our first run."""
        names = ffi.instruction_sets()
        return one.variant if one.variant in names else self._loaded[0].variant or None

    def _measurement(
        self, one: Loaded, cosine: float, samples: Sequence[_Sample], tokens: int, routing: str
    ) -> Measurement:
        return Measurement(
            implementation=one.name,
            variant=one.variant,
            tokens=tokens,
            routing=routing,
            threads=self._threads,
            layers=min(self._layers, one.num_layers),
            milliseconds=1e3 * statistics.median(s.seconds for s in samples),
            gmacs=statistics.median(s.macs for s in samples) / 1e9,
            share_of_peak=statistics.median(s.macs / s.peak for s in samples),
            gbytes=statistics.median(s.nbytes for s in samples) / 1e9,
            share_of_bandwidth=statistics.median(s.nbytes / s.bandwidth for s in samples),
            peak_gmacs=statistics.median(s.peak for s in samples) / 1e9,
            bandwidth_gbytes=statistics.median(s.bandwidth for s in samples) / 1e9,
            peak_set=self._peak_set(one) or "",
            cosine=cosine,
        )
