"""Measures packing: GB/s of packed output from each source, on one thread and on all, and peak memory.

python benchmarks/packing.py            # prints a table, writes results/packing/qwen3-30b-a3b.json
python benchmarks/packing.py --experts 8 --repetitions 1 --json packing.json

Each case runs in a process of its own, so that peak memory is its own: what packing took beside its input and
output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import jax_w4a8 as w4a8
from jax_w4a8 import ffi, packing
from jax_w4a8.bench.machine import Machine
from jax_w4a8.bench.random_weights import random_words
from jax_w4a8.bench.shapes import SHAPES, LayerShape

RESULT = Path(__file__).parent / "results" / "packing" / "qwen3-30b-a3b.json"
#: "numpy" is what packs codes without the extension.
SOURCES = ("codes", "words", "bfloat16", "float32", "numpy")


def reset_peak() -> None:
    """Lets :func:`peak_bytes` start from what is held now, on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most memory that this process has held since the last reset; 0 where the system doesn't say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _stack(shape: LayerShape, group_size: int, source: str, out: int, inputs: int) -> Any:
    """``[E, out, inputs]``: words, codes or floats."""
    words = [random_words((e, out), out, inputs, group_size) for e in range(shape.num_experts)]
    stacked = w4a8.QuantizedWords(
        np.stack([one.words for one in words]), np.stack([one.scale for one in words]), inputs, group_size
    )
    if source == "words":
        return stacked
    if source in ("codes", "numpy"):
        return stacked.unpack()
    dtype = np.dtype(ml_dtypes.bfloat16 if source == "bfloat16" else source)
    floats = np.empty(stacked.shape, dtype)
    for expert, one in enumerate(words):
        floats[expert] = one.unpack().codes
    return floats


def _packer(source: str, group_size: int) -> Callable[[Any, Any], w4a8.ExpertWeights]:
    if source in ("codes", "words", "numpy"):
        return w4a8.pack_experts
    return lambda w13, w2: w4a8.quantize_and_pack_experts(w13, w2, group_size=group_size)


def measure(
    shape: LayerShape, group_size: int, source: str, threads: int, repetitions: int
) -> dict[str, Any]:
    """One case, in the process that calls it."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    w13 = _stack(shape, group_size, source, 2 * inner, hidden)
    w2 = _stack(shape, group_size, source, hidden, inner)
    pack = _packer(source, group_size)
    if source == "numpy":
        packing._native = None  # type: ignore[assignment]
    pack(*_first_expert(w13, w2))  # everything is imported and running
    reset_peak()
    before = peak_bytes()
    seconds = []
    with ffi.thread_limit(threads):
        for _ in range(repetitions):
            start = time.perf_counter()
            packed = pack(w13, w2)
            seconds.append(time.perf_counter() - start)
            nbytes = packed.nbytes
            del packed  # giving memory back takes time, too, and is no part of packing
    return {
        "source": source,
        "group_size": group_size,
        "threads": threads,
        "packed_gbytes": nbytes / 1e9,
        "gbytes_per_second": nbytes / statistics.median(seconds) / 1e9,
        "best_gbytes_per_second": nbytes / min(seconds) / 1e9,
        "extra_gbytes": max(0, peak_bytes() - before - nbytes) / 1e9,
        "expert_gbytes": nbytes / shape.num_experts / 1e9,
    }


def _first_expert(*stacks: Any) -> list[Any]:
    import jax

    return [jax.tree.map(lambda leaf: leaf[:1], stack) for stack in stacks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--group-size", type=int, nargs="+", default=[128, 32, -1])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, ffi.num_threads()])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    shape = dataclasses.replace(SHAPES[arguments.shape], num_experts=arguments.experts)
    results = []
    print("source    group threads  median GB/s    best  extra MB (an expert has MB)")
    context = multiprocessing.get_context("spawn")
    for group_size in arguments.group_size:
        for source in SOURCES:
            for threads in arguments.threads if source != "numpy" else [1]:
                repetitions = arguments.repetitions if source != "numpy" else 1
                with context.Pool(1) as pool:
                    row = pool.apply(measure, (shape, group_size, source, threads, repetitions))
                results.append(row)
                print(
                    f"{source:9} {group_size:5} {threads:7} {row['gbytes_per_second']:12.2f} "
                    f"{row['best_gbytes_per_second']:7.2f} "
                    f"{1e3 * row['extra_gbytes']:9.1f} ({1e3 * row['expert_gbytes']:.1f})",
                    flush=True,
                )
    record = {
        "machine": Machine.here().as_dict(),
        "shape": arguments.shape,
        "experts": arguments.experts,
        "command": "python benchmarks/packing.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "packing": results,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
