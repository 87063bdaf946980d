"""Resident memory of this process over time, and whether it grows."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20


def resident_bytes() -> int:
    """What of this process is in memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass
class Residence:
    """Samples of resident memory; each is the time in seconds, the work done by then, and bytes."""

    samples: list[tuple[float, int, int]] = dataclasses.field(default_factory=list)

    def sample(self, work: int) -> None:
        """Looks once; ``work`` counts whatever memory might grow with."""
        self.samples.append((time.monotonic(), work, resident_bytes()))

    def growth(self, since: float = 0.0) -> float:
        """Bytes by which memory grew from ``since`` on: the slope of a straight line through the samples (by
        least squares, so that no single sample decides), times the time it spans.
        """
        found = np.array([sample for sample in self.samples if sample[0] >= since], np.float64)
        if len(found) < 3:
            return 0.0
        slope = np.polyfit(found[:, 0] - found[0, 0], found[:, 2], 1)[0]
        return float(slope * (found[-1, 0] - found[0, 0]))

    def summary(self, since: float = 0.0) -> dict[str, Any]:
        """First, last and largest sample and growth from ``since`` on, in MiB."""
        found = [sample for sample in self.samples if sample[0] >= since] or self.samples
        resident = [sample[2] / MIB for sample in found]
        return {
            "samples": len(found),
            "first_mib": round(resident[0], 1),
            "last_mib": round(resident[-1], 1),
            "max_mib": round(max(resident), 1),
            "growth_mib": round(self.growth(since) / MIB, 2),
        }
