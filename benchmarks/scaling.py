"""A small cost model of expert parallelism over processes, checked against runs on this machine.

python benchmarks/scaling.py                   # 1, 2 and 4 processes; writes results/scaling.json
python benchmarks/scaling.py --processes 2     # only 2 (and 1, which the model starts from)
python benchmarks/scaling.py --table           # write the table of docs/scaling.md anew from results/

Time of one MoE layer on n processes = C x share(n) x crowding + a(n) + b(n) x bytes. C is the layer's time on
one process with as many threads as each of the n has; share(n) the largest share of the slots that one of
them gets; crowding is 1 unless they have more threads together than the machine has cores. a(n) and b(n) are
the latency and the time per byte of a psum, fitted to psums alone. Nothing is fitted to the layer's times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import jax_w4a8 as w4a8
from jax_w4a8 import distributed, ffi
from jax_w4a8.sharding import ExpertSharding, place_experts

RESULT = Path(__file__).parent / "results" / "scaling.json"
PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
BEGIN, END = "<!-- table: written by benchmarks/scaling.py -->", "<!-- end of table -->"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, GROUP = 64, 8, 2048, 768, 128
TOKENS = (1, 16, 128)
PSUM_KILOBYTES = (8, 64, 256, 1024, 2048)
ROUTINGS = 8
SECONDS = 0.8


def _experts(start: int, stop: int) -> w4a8.ExpertWeights:
    """Random experts, the same whichever run asks for them."""
    rng = np.random.default_rng(start)

    def matrices(*shape: int) -> w4a8.QuantizedTensor:
        codes = rng.integers(-8, 8, (stop - start, *shape), np.int8)
        scale = rng.random((stop - start, shape[0], shape[1] // GROUP), np.float32) / 64
        return w4a8.QuantizedTensor(codes, scale.astype(jax.numpy.bfloat16), GROUP)

    return w4a8.pack_experts(matrices(2 * INTERMEDIATE, HIDDEN), matrices(HIDDEN, INTERMEDIATE))


def _routings(tokens: int) -> list[np.ndarray[Any, Any]]:
    """Chosen experts, int32 [T, k]: uniform, as a balanced model's router has them."""
    rng = np.random.default_rng(tokens)
    return [
        np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32) for _ in range(ROUTINGS)
    ]


def _share(tokens: int, processes: int) -> float:
    """The largest share of the slots that one of the processes gets, averaged over the routings."""
    owners = [ids // (EXPERTS // processes) for ids in _routings(tokens)]
    counts = [np.bincount(owner.reshape(-1), minlength=processes).max() for owner in owners]
    return float(np.mean(counts)) / (tokens * TOP_K)


def _milliseconds(call: Callable[[int], jax.Array], count: int) -> float:
    """Median of calls 0, 1, ... count - 1, 0, ...; all processes make as many."""
    for i in range(count):
        call(i).block_until_ready()
    times = []
    start = time.perf_counter()
    call(0).block_until_ready()
    rounds = max(2, int(SECONDS / max(time.perf_counter() - start, 1e-6) / count))
    rounds = int(_agreed(min(rounds, 200)))
    for i in range(rounds * count):
        start = time.perf_counter()
        call(i % count).block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _agreed(value: int) -> int:
    """Process 0's value, on all processes."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _measure() -> dict[str, Any]:
    """This process's part of the measurement."""
    processes = jax.process_count()
    mesh = jax.make_mesh((processes,), ("expert",))
    found: dict[str, Any] = {"processes": processes, "threads": ffi.num_threads(), "layers": [], "psums": []}
    sharding = ExpertSharding(mesh, "expert")
    experts = place_experts(_experts, EXPERTS, sharding)
    layer = jax.jit(w4a8.fused_experts, static_argnames="sharding")
    for tokens in TOKENS:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((tokens, HIDDEN), np.float32)
        weights = np.full((tokens, TOP_K), 1 / TOP_K, np.float32)
        ids = _routings(tokens)
        for bitwise in (False, True) if processes > 1 else (False,):
            how = ExpertSharding(mesh, "expert", bitwise=bitwise)

            def call(i: int, x=x, weights=weights, ids=ids, how=how) -> jax.Array:  # noqa: ANN001
                return layer(x, weights, ids[i], experts, sharding=how)

            nbytes = 4 * tokens * HIDDEN * (TOP_K if bitwise else 1)
            row = {"tokens": tokens, "bitwise": bitwise, "bytes": nbytes}
            found["layers"].append({**row, "milliseconds": _milliseconds(call, len(ids))})
    if processes > 1:
        found["psums"] = [_psum(mesh, kilobytes) for kilobytes in PSUM_KILOBYTES]
    return found


def _psum(mesh: jax.sharding.Mesh, kilobytes: int) -> dict[str, float]:
    whole = PartitionSpec()
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(jax.lax.pcast(x, "expert", to="varying"), "expert"),
            mesh=mesh,
            in_specs=whole,
            out_specs=whole,
        )
    )
    x = np.ones(256 * kilobytes, np.float32)
    return {"bytes": 1024 * kilobytes, "milliseconds": _milliseconds(lambda _: add(x), 4)}


def _worker(arguments: argparse.Namespace) -> None:
    if arguments.num_processes == 1:
        print(json.dumps(_measure()))
        return
    group = distributed.asked_group(arguments)
    assert group is not None
    with distributed.membership(group):
        found = _measure()
        if group.process_id == 0:
            print(json.dumps(found))


def _run(processes: int, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker"]
    if processes == 1:
        command += ["--distributed", "--num-processes", "1"]
    else:
        launch = "import sys; from jax_w4a8.distributed import launch; launch(sys.argv[2:], int(sys.argv[1]))"
        command = [sys.executable, "-c", launch, str(processes), *command, "--distributed"]
    environment = {**os.environ, "NPROC": str(threads)}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def _predict(run: dict[str, Any], alone: dict[str, Any]) -> None:
    """Adds the fit of the psums and the model's times to a run."""
    nbytes = np.array([p["bytes"] for p in run["psums"]], float)
    times = np.array([p["milliseconds"] for p in run["psums"]])
    # Relative errors: the small psums are the ones that decoding waits for.
    slope, latency = np.polyfit(nbytes, times, 1, w=1 / times)
    run["latency_milliseconds"], run["milliseconds_per_megabyte"] = float(latency), float(slope * 1e6)
    base = {row["tokens"]: row["milliseconds"] for row in alone["layers"]}
    for row in run["layers"]:
        share = _share(row["tokens"], run["processes"])
        crowding = max(1, run["processes"] * run["threads"] / (os.cpu_count() or 1))
        compute = base[row["tokens"]] * share * crowding
        row["share"] = share
        row["compute_milliseconds"] = compute
        row["predicted_milliseconds"] = compute + float(latency + slope * row["bytes"])


def _table(record: dict[str, Any]) -> str:
    lines = [
        f"`{record['command']}` on {record['cores']} cores, jax {record['jax']}; one layer of "
        f"{record['layer']}. `slots` is `bitwise=True`.",
        "",
        "| processes | T | summed | bytes | measured ms | model ms | psum's share of the model |",
        "| --: | --: | --- | --: | --: | --: | --: |",
    ]
    for run in record["runs"]:
        for row in run["layers"]:
            model = row.get("predicted_milliseconds")
            summed = ("slots" if row["bitwise"] else "tokens") if run["psums"] else "-"
            shown = "| |"
            if model is not None:
                shown = f"| {model:.2f} | {1 - row['compute_milliseconds'] / model:.0%} |"
            lines.append(
                f"| {run['processes']} | {row['tokens']} | {summed} | {row['bytes'] if run['psums'] else ''} "
                f"| {row['milliseconds']:.2f} {shown}"
            )
    lines += [""]
    for run in record["runs"][1:]:
        lines.append(
            f"psum over {run['processes']} processes: {run['latency_milliseconds']:.2f} ms "
            f"+ {run['milliseconds_per_megabyte']:.2f} ms per MB  "
        )
    return "\n".join(line.rstrip(" ") if line.endswith("|") else line for line in lines).rstrip()


def _write_table(record: dict[str, Any]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    table = _table(record)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
    print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--table", action="store_true", help="only write the page's table anew")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    distributed.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        _worker(arguments)
        return
    if arguments.table:
        _write_table(json.loads(RESULT.read_text()))
        return
    runs = [_run(n, arguments.threads) for n in (1, *arguments.processes)]
    for run in runs[1:]:
        _predict(run, runs[0])
    record = {
        "command": "python benchmarks/scaling.py",
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "layer": f"{EXPERTS} experts, top {TOP_K}, H {HIDDEN}, I {INTERMEDIATE}, g {GROUP}",
        "runs": runs,
    }
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    _write_table(record)


if __name__ == "__main__":
    main()
