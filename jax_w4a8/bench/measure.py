"""Times implementations and the machine's limits in turn, so that both meet the same machine."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_w4a8 import ffi
from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.routings import ROUTINGS
from jax_w4a8.bench.work import Array, Round, Work, cosine, round_of

#: Tokens up to which a call is so short that a repetition takes several.
FEW_TOKENS = 16
_ROUNDS_OF_FEW = 3
#: Starting a program costs up to half a millisecond with cold caches. A model pays that once for all of
#: its layers, so one takes as many steps as that model has layers, or as this time has room for.
_PROGRAM_SECONDS = 0.05
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
      layers: different layers taken in turn.
      steps: layers that ran in one call.
      milliseconds: per step.
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
    steps: int
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
        inputs = self._round(tokens, 1, routing, rng)
        reference = self._loaded[0].first_output(inputs)
        cosines = [self._check(one, inputs, reference) for one in self._loaded]
        passes = [self._passes(one, inputs) for one in self._loaded]
        samples: list[list[_Sample]] = [[] for _ in self._loaded]
        for _ in range(repetitions * (_ROUNDS_OF_FEW if tokens <= FEW_TOKENS else 1)):
            inputs = self._round(tokens, max(passes), routing, rng)
            for one, count, found in zip(self._loaded, passes, samples, strict=True):
                found.append(self._sample(one, self._part(one, inputs, count)))
            self._limits.sample(self._threads)
        return [
            self._measurement(one, cosine, found, self._part(one, inputs, count), routing)
            for one, cosine, found, count in zip(self._loaded, cosines, samples, passes, strict=True)
        ]

    def _round(self, tokens: int, passes: int, routing: str, rng: np.random.Generator) -> Round:
        return self._work.round(tokens, passes * self._layers, self._layers, routing, rng)

    def _part(self, one: Loaded, inputs: Round, passes: int) -> Round:
        """So many passes over the layers that it holds."""
        steps = range(passes * self._layers)
        return round_of(inputs, [step for step in steps if step % self._layers < one.num_layers])

    def _passes(self, one: Loaded, inputs: Round) -> int:
        """Passes over its layers that a program takes; runs it, so that it is compiled."""
        run = one.prepare(self._part(one, inputs, 1))
        run()
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        room = math.ceil(_PROGRAM_SECONDS / seconds)
        passes = min(room, math.ceil(self._work.model_layers / self._layers))
        if passes > 1:
            more = self._round(inputs.tokens, passes, ROUTINGS[0], np.random.default_rng(0))
            one.prepare(self._part(one, more, passes))()
        return passes

    def _check(self, one: Loaded, inputs: Round, reference: Array) -> float:
        found = cosine(one.first_output(self._part(one, inputs, 1)), reference)
        if not found > _LEAST_COSINE:
            raise RuntimeError(
                f"{one.name} {one.variant} doesn't compute the same layer: cosine {found:.4f} with ours"
            )
        return found

    def _sample(self, one: Loaded, inputs: Round) -> _Sample:
        run = one.prepare(inputs)
        time.sleep(REST_SECONDS)
        bandwidth = self._limits.bandwidth(self._threads)
        start = time.perf_counter()
        run()
        seconds = (time.perf_counter() - start) / inputs.steps
        peak = self._limits.peak_macs(self._threads, self._peak_set(one))
        macs = inputs.tokens * self._work.macs_per_token
        return _Sample(seconds, macs / seconds, self._work.bytes_touched(inputs) / seconds, peak, bandwidth)

    def _peak_set(self, one: Loaded) -> str | None:
        """Peers choose for themselves, so they are compared with the same peak as our first run."""
        names = ffi.instruction_sets()
        return one.variant if one.variant in names else self._loaded[0].variant or None

    def _measurement(
        self, one: Loaded, cosine: float, samples: Sequence[_Sample], inputs: Round, routing: str
    ) -> Measurement:
        return Measurement(
            implementation=one.name,
            variant=one.variant,
            tokens=inputs.tokens,
            routing=routing,
            threads=self._threads,
            layers=min(self._layers, one.num_layers),
            steps=inputs.steps,
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
