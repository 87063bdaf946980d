"""What this machine can do at most, measured now: INT8 dot products per second, bytes read per second."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_w4a8 import ffi
from jax_w4a8.bench.memory import physical_bytes

#: A probe of arithmetic takes about this long.
_PROBE_SECONDS = 0.004
#: Bytes that a probe of bandwidth reads: more than a last-level cache, so that it also leaves it cold.
_READ_BYTES = 384 << 20
_BUFFER_BYTES = 3 * _READ_BYTES


def _timed_on_threads(threads: int, work: Callable[[int], int]) -> float:
    """Units of work per second when every thread does its own part at the same time."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # threads exist before the clock starts
        start = time.perf_counter()
        units = sum(pool.map(work, range(threads)))
        return units / (time.perf_counter() - start)


class Limits:
    """Measures what this machine can do at most, again and again, and remembers what it saw.

    Attributes:
      peaks: MAC/s seen, by (instruction set, threads).
      bandwidths: bytes/s seen, by threads.
    """

    def __init__(self, buffer_bytes: int = _BUFFER_BYTES, read_bytes: int = _READ_BYTES) -> None:
        self._buffer = np.ones(buffer_bytes, np.uint8)
        self._read_bytes = read_bytes
        self._offset = 0
        self._iterations: dict[str, int] = {}
        self.peaks: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.bandwidths: dict[int, list[float]] = defaultdict(list)
        self._turn = 0

    def peak_macs(self, threads: int, instruction_set: str | None = None) -> float:
        """INT8 multiply-accumulates per second in registers alone, by default with the set in use."""
        name = instruction_set or ffi.instruction_set() or ""
        with ffi.using_instruction_set(name):
            if name not in self._iterations:
                self._iterations[name] = _calibrate()
            iterations = self._iterations[name]
            rate = _timed_on_threads(threads, lambda _: ffi.peak_probe(iterations))
        self.peaks[name, threads].append(rate)
        return rate

    def bandwidth(self, threads: int) -> float:
        """Bytes per second read from memory, other ones at every call; leaves caches cold."""
        share = self._read_bytes // threads // 256 * 256
        start = self._offset
        self._offset = start + self._read_bytes
        if self._offset + self._read_bytes > len(self._buffer):
            self._offset = 0

        def read(thread: int) -> int:
            begin = start + thread * share
            ffi.read_probe(self._buffer[begin : begin + share])
            return share

        rate = _timed_on_threads(threads, read)
        self.bandwidths[threads].append(rate)
        return rate

    def sample(self, threads: int) -> None:
        """Measures one limit that the work in hand is not compared with: all of them, in turn."""
        counts = range(1, threads + 1)
        kinds = [(name, count) for name in (*ffi.instruction_sets(), None) for count in counts]
        name, count = kinds[self._turn % len(kinds)]
        self._turn += 1
        if name is None:
            self.bandwidth(count)
        else:
            self.peak_macs(count, name)

    def summary(self) -> dict[str, Any]:
        """Medians: G MAC/s by instruction set and threads, GB/s by threads."""
        peaks: dict[str, dict[str, float]] = {}
        for (name, threads), rates in sorted(self.peaks.items()):
            peaks.setdefault(name, {})[str(threads)] = statistics.median(rates) / 1e9
        bandwidths = {str(n): statistics.median(rates) / 1e9 for n, rates in sorted(self.bandwidths.items())}
        return {"peak_gmacs": peaks, "bandwidth_gbytes": bandwidths}


def _calibrate() -> int:
    """Iterations of the set in use that take about the time of a probe."""
    iterations = 1000
    while True:
        start = time.perf_counter()
        ffi.peak_probe(iterations)
        taken = time.perf_counter() - start
        if taken > _PROBE_SECONDS / 4:
            return max(1, int(iterations * _PROBE_SECONDS / taken))
        iterations *= 4


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a recorded figure must be read against."""

    cpu: str
    cores: int
    threads: int
    instruction_set: str
    memory_gib: float
    python: str
    jax: str
    jaxlib: str

    @classmethod
    def here(cls) -> Machine:
        """This machine and process."""
        return cls(
            cpu=_cpu_name(),
            cores=os.cpu_count() or 1,
            threads=ffi.num_threads(),
            instruction_set=ffi.instruction_set() or "none",
            memory_gib=round(physical_bytes() / 2**30, 1),
            python=platform.python_version(),
            jax=jax.__version__,
            jaxlib=importlib.metadata.version("jaxlib"),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        facts = {}
        for line in info.read_text().split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
        name = facts.get("model name", platform.machine())
        return f"{name}, family {facts.get('cpu family')}, model {facts.get('model')}"
    return platform.processor() or platform.machine()
