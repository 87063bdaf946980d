"""``bench --model``: a whole model, part by part, beside llama.cpp if asked."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_w4a8 import ffi
from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.model import (
    ModelCase,
    ModelResult,
    ModelRun,
    Timed,
    check_memory,
    measure,
    print_breakdown,
    slots_of,
)
from jax_w4a8.bench.model_configs import find_config
from jax_w4a8.bench.peers import LlamaCpp, Peer
from jax_w4a8.bench.peers.llamacpp_model import (
    LlamaCppModel,
    check_architecture,
    file_bytes,
    require_gguf,
)

HEADS = ("bfloat16", "w4a8")
_COLUMNS = "  {:<24} {:>13} {:>13} {:>12} {:>12} {:>8}"


def run_model(args: argparse.Namespace, peers: Sequence[Peer], limits: type[Limits]) -> dict[str, Any]:
    """Runs one whole model; returns what goes into JSON.

    Raises:
      ValueError: an unknown model, more layers than it has, or a peer that doesn't run whole models.
      ImportError: a peer needs another package for whole models.
      MemoryError: it doesn't fit; nothing has been allocated then.
      OSError: the disk has no room for a peer's file.
    """
    case = ModelCase(
        args.model,
        args.layers,
        args.group_size[0],
        args.head == "w4a8",
        args.prompt_tokens,
        args.decode_tokens,
    )
    fields = find_config(case.name, case.layers)
    whole = _whole_model_peers(peers, fields)
    beside = sum(1.05 * file_bytes(fields, peer.kind) for peer in whole)
    config, plan = check_memory(case, beside)
    threads = ffi.num_threads()
    print(
        f"{case.name}, {config.num_layers} layers, group size {case.group_size}, {args.head} head, "
        f"{threads} threads, {ffi.instruction_set()}",
        flush=True,
    )
    run = ModelRun(case, config, plan, lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory() as folder:
        others = [LlamaCppModel(fields, peer, threads, slots_of(case), Path(folder)) for peer in whole]
        return _measured(run, others, limits(), args.repetitions)


def _whole_model_peers(peers: Sequence[Peer], fields: dict[str, Any]) -> list[LlamaCpp]:
    found = []
    for peer in peers:
        if not isinstance(peer, LlamaCpp):
            raise ValueError(f"peer must be 'llama.cpp' with --model, got {peer.name!r}")
        check_architecture(fields)
        require_gguf()
        # Repacked Q4_0 decodes fastest, plain Q4_K takes prompts fastest.
        if (peer.kind, peer.repacked) in (("q4_0", True), ("q4_K", False)):
            found.append(peer)
    return found


def _measured(
    run: ModelRun, others: Sequence[LlamaCppModel], limits: Limits, repetitions: int
) -> dict[str, Any]:
    models: list[Timed] = [run, *others]
    must_read = sum(run.must_read.values())
    results = measure(models, run.case, must_read, limits, repetitions)
    print(
        _COLUMNS.format("", "prefill s", "tokens/s", "ms per token", "tokens/s", "of bw"),
    )
    for result in results:
        print(_row(result), flush=True)
    step, prefill = run.step_breakdown(), run.prefill_breakdown()
    ours = results[0]
    print_breakdown("decode step", step, ours.step_milliseconds, run.must_read)
    print_breakdown("prefill", prefill, 1e3 * ours.prefill_seconds, None)
    print(
        f"  a step must read {must_read / 1e6:.0f} MB; in {ours.step_milliseconds:.1f} ms the machine reads "
        f"{ours.bandwidth_gbytes * ours.step_milliseconds:.0f} MB: {ours.step_bandwidth_share:.0%}"
    )
    return {
        "model": dataclasses.asdict(run.case),
        "instruction_set": ffi.instruction_set(),
        "weight_bytes": run.weight_bytes,
        "build_seconds": run.build_seconds,
        "compile_seconds": run.compile_seconds,
        "results": [dataclasses.asdict(result) for result in results],
        "must_read_bytes": run.must_read,
        "step_milliseconds": step.milliseconds,
        "step_operations": step.operations,
        "prefill_milliseconds": prefill.milliseconds,
        "limits": limits.summary(),
    }


def _row(result: ModelResult) -> str:
    return _COLUMNS.format(
        result.implementation,
        f"{result.prefill_seconds:.2f}",
        f"{result.prefill_rate:.1f}",
        f"{result.step_milliseconds:.2f}",
        f"{result.decode_rate:.2f}",
        f"{result.step_bandwidth_share:.0%}",
    )
