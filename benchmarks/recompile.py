"""Compiles the layer for thousands of shapes, and watches what stays behind.

    python benchmarks/recompile.py --compiles 10000 [--every 250] [--json FILE]

Each compilation is of tokens of a new shape, under ``jit``; each tenth is of a new activation limit besides,
and goes through the eager call, which keeps programs by their static options. After every so many, JAX's
caches are cleared and resident memory is looked at. JAX keeps something of its own: so a quarter as many
compilations of a pure-JAX function of the same arguments run in a process of their own, and the difference is
ours.

It fails if ours leaves more than LEAK_BOUND bytes per compilation beyond the control's (slopes of straight
lines through all but the first quarter of the samples), if a result changes, or if more working memory is
kept than a call needs.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from resident import MIB, Residence
from verdict import circumstances, report

import jax_w4a8 as w4a8

NDArray = np.ndarray[Any, Any]
#: Bytes that a compilation may leave behind beyond what the control's does.
LEAK_BOUND = 512
#: Bytes of working memory that may be kept.
SCRATCH_BOUND = MIB
EXPERTS, TOP_K, HIDDEN, INNER = 2, 1, 32, 32
#: Sizes that each of the two leading axes runs through.
SIDE = 101


def _inputs(number: int) -> tuple[NDArray, NDArray, NDArray]:
    """Tokens ``[a, b, H]``, other a and b for each number; the first token is always the same.

    In numpy: JAX would compile a program for each array that it takes over.
    """
    lead = (number % SIDE + 1, number // SIDE + 1)
    x = np.resize(np.linspace(-1, 1, 37, dtype=np.float32), (*lead, HIDDEN))
    ids = np.resize(np.arange(EXPERTS, dtype=np.int32), (*lead, TOP_K))
    return x, np.ones((*lead, TOP_K), np.float32), ids


def _weights() -> w4a8.ExpertWeights:
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    w13, w2 = (w4a8.quantize(rng.standard_normal(shape, np.float32), 32) for shape in shapes)
    return jax.tree.map(jnp.asarray, w4a8.pack_experts(w13, w2))


def _control(x: jax.Array, weights: jax.Array, ids: jax.Array, experts: w4a8.ExpertWeights) -> jax.Array:
    """As many operands, of the same shapes, under ``keep_unused``; no custom call, and little to compile."""
    del experts
    return x * weights + ids


def _layer(number: int, limit: bool) -> Callable[..., jax.Array]:
    """A new function object, so that nothing but its operands' shapes could be remembered."""
    activation = w4a8.Activation("swigluoai", limit=1.0 + number) if limit else "silu"
    call = functools.partial(w4a8.fused_experts, activation=activation)
    return call if limit else jax.jit(call)


def run(compiles: int, every: int, control: bool) -> dict[str, Any]:
    """One process's part: compiles so many times."""
    experts, residence = _weights(), Residence()
    first = np.asarray(w4a8.fused_experts(*_inputs(0), experts))[0, 0]
    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: (
            compiled.append(seconds) if name.endswith("backend_compile_duration") else None
        )
    )
    trim = ctypes.CDLL(None).malloc_trim
    start, changed, recompiled = time.perf_counter(), 0, 0
    for number in range(1, compiles + 1):
        before = len(compiled)
        call = jax.jit(_control, keep_unused=True) if control else _layer(number, number % 10 == 0)
        y = np.asarray(call(*_inputs(number), experts))
        recompiled += len(compiled) > before
        if not control and number % 10:
            changed += not np.array_equal(y[0, 0], first)
        if number % every == 0:
            del call
            jax.clear_caches()
            gc.collect()
            trim(0)
            residence.sample(number)
    settled = residence.samples[len(residence.samples) // 4 :]
    work = [sample.work for sample in settled]
    resident = [sample.resident for sample in settled]
    return {
        "compiles": recompiled,
        "programs": len(compiled),
        "seconds": round(time.perf_counter() - start, 1),
        "changed_results": changed,
        "resident": residence.summary(),
        "bytes_per_compile": round(float(np.polyfit(work, resident, 1)[0]), 1),
        "scratch_bytes": w4a8.release_scratch(),
    }


def _in_process(compiles: int, every: int, control: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", "control" if control else "layer"]
    command += ["--compiles", str(compiles), "--every", str(every)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(compiles: int, every: int) -> dict[str, Any]:
    """Both processes, one after the other, and the verdict."""
    control = _in_process(compiles // 4, every, control=True)
    layer = _in_process(compiles, every, control=False)
    excess = layer["bytes_per_compile"] - control["bytes_per_compile"]
    faults = []
    if excess > LEAK_BOUND:
        faults.append(f"a compilation leaves {excess:.0f} bytes more than the control's")
    if layer["changed_results"]:
        faults.append(f"{layer['changed_results']} results differ from the first")
    if layer["scratch_bytes"] > SCRATCH_BOUND:
        faults.append(f"{layer['scratch_bytes']} bytes of working memory are kept")
    if layer["compiles"] < compiles:
        faults.append(f"only {layer['compiles']} programs were compiled")
    return {
        "layer": layer,
        "control": control,
        "excess_bytes_per_compile": round(excess, 1),
        "leak_bound_bytes": LEAK_BOUND,
        "scratch_bound_bytes": SCRATCH_BOUND,
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--compiles", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=250, help="compilations between looks at memory")
    parser.add_argument("--json", type=Path, help="write what happened here too")
    parser.add_argument("--part", choices=["layer", "control"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        print(json.dumps(run(arguments.compiles, arguments.every, arguments.part == "control")))
        return 0
    if arguments.compiles >= SIDE**2:
        parser.error(f"--compiles must be below {SIDE**2}, got {arguments.compiles}")
    head = circumstances()
    return report(head, compare(arguments.compiles, arguments.every), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
