"""Memory of this process over time, resident and allocated, and whether it grows."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

MIB = 1 << 20


def resident_bytes() -> int:
    """What of this process is in memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Allocated(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``in_use`` is its ``uordblks``, ``mapped`` its ``hblkhd``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free", "small", "maps", "mapped", "_", "fast", "in_use", "unused", "top")
    ]


def allocated_bytes() -> int:
    """What ``malloc`` has given out and not got back, in all of its arenas; 0 without glibc 2.33.

    Unlike resident memory it does not count the holes that each thread's arena keeps between allocations.
    """
    try:
        look = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    look.restype = _Allocated
    found = look()
    return int(found.in_use + found.mapped)


class Sample(NamedTuple):
    """Memory at a time.

    Attributes:
      seconds: of a monotonic clock.
      work: what had been done by then, in a unit of the caller's.
      resident, allocated: bytes, as the functions above tell.
    """

    seconds: float
    work: int
    resident: int
    allocated: int


@dataclasses.dataclass
class Residence:
    """Samples of memory over time."""

    samples: list[Sample] = dataclasses.field(default_factory=list)

    def sample(self, work: int) -> None:
        """Looks once; ``work`` counts whatever memory might grow with."""
        self.samples.append(Sample(time.monotonic(), work, resident_bytes(), allocated_bytes()))

    def growth(self, since: float = 0.0, of: Literal["resident", "allocated"] = "resident") -> float:
        """Bytes by which memory grew from ``since`` on: the slope of a straight line through the samples (by
        least squares, so that no single sample decides), times the time it spans.
        """
        found = [sample for sample in self.samples if sample.seconds >= since]
        if len(found) < 3:
            return 0.0
        seconds = np.array([sample.seconds for sample in found]) - found[0].seconds
        memory = np.array([getattr(sample, of) for sample in found], np.float64)
        return float(np.polyfit(seconds, memory, 1)[0] * seconds[-1])

    def summary(self, since: float = 0.0) -> dict[str, Any]:
        """First, last and largest sample of resident memory, and growth, from ``since`` on, in MiB."""
        found = [sample for sample in self.samples if sample.seconds >= since] or self.samples
        resident = [sample.resident / MIB for sample in found]
        return {
            "samples": len(found),
            "first_mib": round(resident[0], 1),
            "last_mib": round(resident[-1], 1),
            "max_mib": round(max(resident), 1),
            "growth_mib": round(self.growth(since) / MIB, 2),
            "allocated_growth_mib": round(self.growth(since, "allocated") / MIB, 2),
        }
