"""What this machine can do at most, measured now: INT8 dot products per second, bytes read per second."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_w4a8 import ffi

_PROBE_ITERATIONS = 30_000
_BUFFER_BYTES = 1 << 30


def _timed_on_threads(threads: int, work: Callable[[int], int]) -> float:
    """Units of work per second when every thread does its own part at the same time."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(threads)))  # threads exist before the clock starts
        start = time.perf_counter()
        units = sum(pool.map(work, range(threads)))
        return units / (time.perf_counter() - start)


class Limits:
    """Measures the limits of ``threads`` threads with the instruction set in use."""

    def __init__(self, threads: int, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self.threads = threads
        self._buffer = np.ones(buffer_bytes, np.uint8)
        self._offset = 0

    def peak_macs(self) -> float:
        """INT8 multiply-accumulates per second in registers alone."""
        return _timed_on_threads(self.threads, lambda _: ffi.peak_probe(_PROBE_ITERATIONS))

    def bandwidth(self, nbytes: int = 1 << 28) -> float:
        """Bytes per second read from memory, ``nbytes`` of them, other ones at every call."""
        share = nbytes // self.threads // 256 * 256
        start = self._offset
        self._offset = (start + nbytes) % (len(self._buffer) - nbytes)

        def read(thread: int) -> int:
            begin = start + thread * share
            ffi.read_probe(self._buffer[begin : begin + share])
            return share

        return _timed_on_threads(self.threads, read)


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
            memory_gib=round(_memory_bytes() / 2**30, 1),
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


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def available_bytes() -> int:
    """Memory that can be allocated without swapping; all of it where the system doesn't say."""
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _memory_bytes()
