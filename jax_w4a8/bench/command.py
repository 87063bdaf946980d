"""The ``bench`` subcommand: layers and linear maps against the machine's own limits, and peers."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jax_w4a8 import ffi
from jax_w4a8.bench.baselines import BASELINES
from jax_w4a8.bench.implementations import Implementation, Loaded, Native
from jax_w4a8.bench.machine import Limits, Machine
from jax_w4a8.bench.measure import FEW_TOKENS, Bench, Measurement
from jax_w4a8.bench.memory import available_bytes
from jax_w4a8.bench.peers import PEERS, find_peers
from jax_w4a8.bench.plot import require_matplotlib, save_roofline
from jax_w4a8.bench.routings import ROUTINGS
from jax_w4a8.bench.shapes import SHAPES, find_shape, parse_linear
from jax_w4a8.bench.work import LinearWork, MoEWork, Work

_COLUMNS = (
    "  {name:<26} {tokens:>5} {routing:>8} {milliseconds:>9.3f} {gmacs:>7.0f} {share_of_peak:>7.0%} "
    "{gbytes:>7.1f} {share_of_bandwidth:>6.0%}  {bound:>7} {share_of_bound:>5.0%}"
)
_HEADER = (
    f"  {'implementation':<26} {'T':>5} {'routing':>8} {'ms':>9} {'GMAC/s':>7} {'of peak':>7} "
    f"{'GB/s':>7} {'of bw':>6}  {'bound':>7} {'share':>5}"
)
_BEST = "best"
#: What a run needs beside the weights: the buffer that bandwidth is read from, scratch, JAX itself.
_OVERHEAD_BYTES = 3 << 30
#: Layers that few tokens take in turn.
_LAYERS_OF_FEW = 8
#: Layers that many tokens take in turn: each of them reads more than a cache holds.
_LAYERS_OF_MANY = 2
#: The same of linear maps: so short that what a program does once, such as a copy of x, would weigh.
_LINEARS_OF_MANY = 16
#: One call over small linear maps should touch this much, so that none is met in a cache.
_COLD_BYTES = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommand's arguments."""
    what = parser.add_argument_group("what is run")
    what.add_argument("--shape", nargs="+", metavar="NAME", help=f"MoE layers: {', '.join(SHAPES)}")
    what.add_argument(
        "--linear", nargs="+", metavar="NxK", default=[], help="linear maps instead, such as 1536x2048"
    )
    what.add_argument(
        "--group-size", type=int, nargs="+", default=[128], metavar="G", help="-1 for channel-wise"
    )
    what.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], metavar="T")
    what.add_argument("--routing", nargs="+", choices=ROUTINGS, default=["uniform"])
    what.add_argument(
        "--layers", type=int, help="different layers taken in turn by few tokens (8); with --model: all"
    )
    what.add_argument("--repetitions", type=int, default=7)
    what.add_argument("--threads", type=int, nargs="+", help="at most so many of XLA's pool; default: all")
    what.add_argument(
        "--instruction-set",
        nargs="+",
        metavar="NAME",
        default=[_BEST],
        help=f"those to run with, of {', '.join(ffi.instruction_sets())}, or '{_BEST}', the default",
    )
    whole = parser.add_argument_group("a whole model instead of layers")
    whole.add_argument("--model", metavar="NAME", help="such as qwen3-30b-a3b, with random weights")
    whole.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    whole.add_argument("--decode-tokens", type=int, default=64, metavar="N")
    whole.add_argument("--head", choices=("bfloat16", "w4a8"), default="bfloat16", help="of the output")
    beside = parser.add_argument_group("what runs beside it, in turn")
    beside.add_argument(
        "--baseline", nargs="+", choices=BASELINES, default=[], help="pure JAX ways to do the same"
    )
    beside.add_argument(
        "--peer", nargs="+", default=[], metavar="NAME", help=f"other runtimes: {', '.join(PEERS)}"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline as a PNG")


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
      ValueError: an unknown shape, peer or instruction set, or a size out of range.
      ImportError: a peer's package, or matplotlib for a plot, is missing.
      MemoryError: the layers don't fit; nothing has been allocated then.
      RuntimeError: there is no native backend here, or a peer computes something else.
    """
    if not ffi.native_available():
        raise RuntimeError(f"the native backend is not available: {ffi.unavailable_reason()}")
    for name in ("tokens", "layers", "repetitions", "threads", "prompt_tokens", "decode_tokens"):
        values = getattr(args, name)
        least = min(values) if isinstance(values, list) else values
        if least is not None and least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    if args.plot:
        require_matplotlib()
    if args.model:
        return _run_model(args)
    layers = args.layers or _LAYERS_OF_FEW
    works = list(_works(args))
    natives = _natives(args)
    others = [*(BASELINES[name] for name in args.baseline), *find_peers(args.peer)]
    threads = sorted({min(n, ffi.num_threads()) for n in args.threads or [ffi.num_threads()]})
    for work in works:
        _check_memory(work, [*natives, *others], layers)
    machine = Machine.here()
    print(f"{machine.cpu}, {max(threads)} threads, {', '.join(one.instruction_set for one in natives)}")
    limits = Limits()
    results = []
    for work in works:
        print(f"{work.name}, group size {work.group_size}\n{_HEADER}", flush=True)
        weights = work.layers(_layer_count(work, layers))
        for count in threads:
            for measurement in _measure(work, weights, natives, others, count, limits, args):
                _print(measurement)
                results.append({"work": work.name, "group_size": work.group_size, **measurement.as_dict()})
        del weights
    record = {**_circumstances(args), "limits": limits.summary(), "results": results}
    _print_limits(record["limits"])
    _write_json(args.json, record)
    if args.plot:
        save_roofline(record, args.plot)
    return 0


def _run_model(args: argparse.Namespace) -> int:
    from jax_w4a8.bench.model_command import run_model  # needs what models need

    ffi.set_instruction_set(_instruction_sets(args)[0])
    if args.plot or args.baseline:
        raise ValueError("--plot and --baseline are for layers, not for --model")
    found = run_model(args, find_peers(args.peer), Limits)
    _write_json(args.json, {**_circumstances(args), **found})
    return 0


def _circumstances(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": Machine.here().as_dict(),
        "peers": {name: PEERS[name][0].version() for name in args.peer},
        "command": shlex.join(["python", "-m", "jax_w4a8", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _write_json(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def _works(args: argparse.Namespace) -> Iterator[Work]:
    shapes = args.shape or ([] if args.linear else ["qwen3-30b-a3b"])
    for name, group_size in itertools.product(shapes, args.group_size):
        yield MoEWork(name, find_shape(name), group_size)
    for text, group_size in itertools.product(args.linear, args.group_size):
        yield LinearWork(f"linear {text}", parse_linear(text), group_size)


def _natives(args: argparse.Namespace) -> list[Native]:
    return [Native(name) for name in _instruction_sets(args)]


def _instruction_sets(args: argparse.Namespace) -> list[str]:
    """Each once; "best" is the one in use, which is the best one unless a lower one was forced."""
    names = [ffi.instruction_set() or "" if name == _BEST else name for name in args.instruction_set]
    for name in names:
        with ffi.using_instruction_set(name):  # refuses what this machine can't run
            pass
    return list(dict.fromkeys(names))


def _layer_count(work: Work, asked: int) -> int:
    return (
        max(asked, min(256, -(-_COLD_BYTES // work.layer_bytes))) if isinstance(work, LinearWork) else asked
    )


def _measure(
    work: Work,
    layers: Sequence[Any],
    natives: Sequence[Native],
    others: Sequence[Implementation],
    threads: int,
    limits: Limits,
    args: argparse.Namespace,
) -> Iterator[Measurement]:
    """Few tokens over all layers, then many over some: what others hold in memory is loaded anew."""
    usable: list[Implementation] = list(natives)
    for one in others:
        reason = one.refusal(work, threads)
        if reason is None:
            usable.append(one)
        else:
            print(f"  {one.name}: left out, {reason}", flush=True)
    few = [tokens for tokens in args.tokens if tokens <= FEW_TOKENS]
    many = [tokens for tokens in args.tokens if tokens > FEW_TOKENS]
    count = _LINEARS_OF_MANY if isinstance(work, LinearWork) else _LAYERS_OF_MANY
    for tokens_of_kind, part in ((few, layers), (many, layers[:count])):
        if not tokens_of_kind:
            continue
        loaded = [one.load(work, part, threads) for one in usable]
        try:
            bench = Bench(work, loaded, len(part), threads, limits)
            for routing, tokens in itertools.product(args.routing, tokens_of_kind):
                yield from bench.run(tokens, routing, args.repetitions)
        finally:
            _close(loaded)


def _close(loaded: Sequence[Loaded]) -> None:
    for one in loaded:
        one.close()


def _print(measurement: Measurement) -> None:
    name = f"{measurement.implementation} {measurement.variant}"
    if measurement.threads != ffi.num_threads():
        name += f", {measurement.threads} thr"
    print(_COLUMNS.format(name=name, **measurement.as_dict()), flush=True)


def _print_limits(limits: dict[str, Any]) -> None:
    print("limits seen, medians")
    for name, by_threads in limits["peak_gmacs"].items():
        text = ", ".join(f"{rate:.0f} on {count}" for count, rate in by_threads.items())
        print(f"  {name} peak, G MAC/s by threads: {text}")
    text = ", ".join(f"{rate:.1f} on {count}" for count, rate in limits["bandwidth_gbytes"].items())
    print(f"  bandwidth, GB/s by threads: {text}")


def _check_memory(work: Work, implementations: Sequence[Implementation], asked: int) -> None:
    layers = _layer_count(work, asked)
    needed = _OVERHEAD_BYTES + work.layer_bytes * layers
    needed += sum(
        int(one.bytes_per_layer(work)) * (layers if one.holds_all else 1) for one in implementations
    )
    available = available_bytes()
    if needed > available:
        raise MemoryError(
            f"{layers} layers of {work.name} need about {needed / 2**30:.1f} GiB with all that runs beside "
            f"them, and {available / 2**30:.1f} GiB are free: take fewer with --layers"
        )
