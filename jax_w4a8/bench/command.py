"""The ``bench`` subcommand: layers of known shapes against the machine's own limits."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_w4a8 import ffi
from jax_w4a8.bench.layers import BASELINES, NATIVE, ROUTINGS, LayerBench, Measurement
from jax_w4a8.bench.machine import Limits, Machine, available_bytes
from jax_w4a8.bench.shapes import SHAPES, LayerShape, find_shape
from jax_w4a8.quantization import normalize_group_size

_COLUMNS = (
    "  {implementation:>14} {tokens:>6} {routing:>8} {milliseconds:>10.2f} {gmacs:>8.0f} "
    "{share_of_peak:>7.0%} {gbytes:>7.1f} {share_of_bandwidth:>7.0%} {bound:>7.0%}"
)
_HEADER = "  implementation tokens  routing         ms   GMAC/s  % peak    GB/s    % bw % bound"
#: What a run needs beside the weights: the buffer that bandwidth is read from, scratch, JAX itself.
_OVERHEAD_BYTES = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommand's arguments."""
    parser.add_argument("--shape", nargs="+", default=["qwen3-30b-a3b"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--group-size", type=int, default=128, help="-1 for channel-wise scales")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    parser.add_argument(
        "--baseline", nargs="+", choices=BASELINES, default=[], help="pure JAX ways to do the same, too"
    )
    parser.add_argument("--layers", type=int, default=4, help="different layers taken in turn")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, help="at most this many of XLA's pool")
    parser.add_argument("--instruction-set", help="one that this machine can run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
      ValueError: an unknown shape or instruction set, or a size out of range.
      MemoryError: the layers don't fit; nothing has been allocated then.
      RuntimeError: there is no native backend here.
    """
    if not ffi.native_available():
        raise RuntimeError(f"the native backend is not available: {ffi.unavailable_reason()}")
    for name, values in (
        ("tokens", args.tokens),
        ("layers", [args.layers]),
        ("repetitions", [args.repetitions]),
    ):
        if min(values) < 1:
            raise ValueError(f"{name} must be at least 1, got {min(values)}")
    if args.instruction_set:
        ffi.set_instruction_set(args.instruction_set)
    shapes = {name: find_shape(name) for name in args.shape}
    for name, shape in shapes.items():
        normalize_group_size(args.group_size, shape.hidden_size)
        _check_memory(name, shape, args)
    threads = min(args.threads or ffi.num_threads(), ffi.num_threads())
    machine = Machine.here()
    print(f"{machine.cpu}, {threads} threads, {machine.instruction_set}")
    results = []
    with ffi.thread_limit(threads):
        limits = Limits(threads)
        for name, shape in shapes.items():
            print(f"{name}, group size {args.group_size}\n{_HEADER}", flush=True)
            for measurement in _measure(shape, limits, args):
                _print(measurement)
                results.append(
                    {"shape": name, "group_size": args.group_size, **dataclasses.asdict(measurement)}
                )
    if args.json:
        _write_json(args.json, machine, threads, results)
    return 0


def _measure(shape: LayerShape, limits: Limits, args: argparse.Namespace) -> Iterator[Measurement]:
    bench = LayerBench(shape, args.group_size, args.layers)
    implementations = [NATIVE, *(BASELINES[name] for name in args.baseline)]
    for routing, tokens, one in itertools.product(args.routing, args.tokens, implementations):
        yield bench.run(tokens, routing, limits, args.repetitions, one)


def _print(measurement: Measurement) -> None:
    values = dataclasses.asdict(measurement)
    print(_COLUMNS.format(**values, bound=measurement.share_of_bound), flush=True)


def _check_memory(name: str, shape: LayerShape, args: argparse.Namespace) -> None:
    weights = shape.num_experts * 3 * shape.hidden_size * shape.intermediate_size // 2
    needed = int(weights * 1.15) * args.layers + _OVERHEAD_BYTES
    available = available_bytes()
    if needed > available:
        raise MemoryError(
            f"{args.layers} layers of {name} need about {needed / 2**30:.1f} GiB, and "
            f"{available / 2**30:.1f} GiB are free: take fewer with --layers"
        )


def _write_json(path: Path, machine: Machine, threads: int, results: list[dict[str, Any]]) -> None:
    record = {
        "machine": machine.as_dict(),
        "threads": threads,
        "command": shlex.join(["python", "-m", "jax_w4a8", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
