"""Many native calls at once never wait for each other: each program here ends, within a time limit.

The handlers of concurrent calls run on XLA's intra-op pool themselves, so that a handler that waited for
tasks of that pool would stop the process when all its threads are handlers. Pools of one and two threads.
"""

import os
import subprocess
import sys
import textwrap

import pytest

import jax_w4a8 as w4a8

pytestmark = pytest.mark.skipif(not w4a8.native_available(), reason="needs the native extension")

LIMIT = 120

SETUP = """
import functools, os, sys, threading, time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_w4a8 as w4a8
from jax_w4a8.sharding import ExpertSharding, place

E, K, H, I = 8, 2, 256, 128
rng = np.random.default_rng(0)
def matrices(*shape):
    return w4a8.quantize(rng.standard_normal(shape, np.float32), 32)
experts = w4a8.pack_experts(matrices(E, 2 * I, H), matrices(E, H, I))
dense = w4a8.pack_linear(matrices(H, H))
def inputs(tokens=64):
    x = rng.standard_normal((tokens, H), np.float32)
    return x, np.full((tokens, K), 1 / K, np.float32), rng.integers(0, E, (tokens, K)).astype(np.int32)
def same(a, b):
    assert np.array_equal(np.asarray(a), np.asarray(b))
"""

PROGRAMS = {
    "independent_calls": """
calls = [inputs() for _ in range(16)]
@jax.jit
def together(calls, experts, dense):
    return [w4a8.linear(w4a8.fused_experts(*c, experts), dense) for c in calls]
alone = [w4a8.linear(w4a8.fused_experts(*c, experts), dense) for c in calls]
for _ in range(10):
    for one, want in zip(together(calls, experts, dense), alone, strict=True):
        same(one, want)
""",
    "inside_scan": """
calls = [inputs() for _ in range(6)]
@jax.jit
def loop(calls, experts):
    def step(xs, _):
        ys = [w4a8.fused_experts(x, *c[1:], experts) for x, c in zip(xs, calls, strict=True)]
        return [y / jnp.abs(y).max() for y in ys], None
    return jax.lax.scan(step, [jnp.asarray(c[0]) for c in calls], None, length=20)[0]
first = loop(calls, experts)
for one, again in zip(first, loop(calls, experts), strict=True):
    same(one, again)
""",
    "eight_devices": """
mesh = jax.make_mesh((8,), ("all",))
x, weights, ids = inputs()
expected = w4a8.fused_experts(x, weights, ids, experts)
spread = ExpertSharding(mesh, "all", bitwise=True)
placed = place(experts, spread)
tokens = ExpertSharding(mesh, tokens="all")
for _ in range(10):
    same(w4a8.fused_experts(x, weights, ids, placed, sharding=spread), expected)
    same(w4a8.fused_experts(x, weights, ids, experts, sharding=tokens), expected)
""",
    "eight_devices_inside_scan": """
mesh = jax.make_mesh((8,), ("all",))
x, weights, ids = inputs()
spread = ExpertSharding(mesh, "all")
placed = place(experts, spread)
@jax.jit
def loop(x, placed):
    def step(x, _):
        y = w4a8.fused_experts(x, weights, ids, placed, sharding=spread)
        return y / jnp.abs(y).max(), None
    return jax.lax.scan(step, x, None, length=20)[0]
same(loop(x, placed), loop(x, placed))
""",
    "python_threads": """
calls = [inputs() for _ in range(6)]
layer = jax.jit(lambda x, w, i, e, d: w4a8.linear(w4a8.fused_experts(x, w, i, e), d))
expected = [np.asarray(layer(*c, experts, dense)) for c in calls]
devices = jax.devices()
wrong = []
def work(number):
    on = jax.device_put((experts, dense), devices[number % 8])
    for turn in range(20):
        pick = (number + turn) % len(calls)
        if not np.array_equal(np.asarray(layer(*calls[pick], *on)), expected[pick]):
            wrong.append((number, turn))
threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
for t in threads: t.start()
for t in threads: t.join()
assert not wrong, wrong
""",
}


def _run(code, threads):
    try:
        done = subprocess.run(
            [sys.executable, "-c", SETUP + code + "\nprint('ended')"],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": threads},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {LIMIT} s")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ended"


@pytest.mark.parametrize("threads", ["1", "2"])
def test_calls_end(threads):
    """All programs, one after the other in one process."""
    _run("\n".join(PROGRAMS.values()), threads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_threads_follow_the_affinity():
    """Started on one processor of several (``taskset -c 0``), no more than one thread works at a time."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("needs two processors")
    code = f"""
    import os, time
    os.sched_setaffinity(0, {{{processors[0]}}})
    import jax, numpy as np
    import jax_w4a8 as w4a8
    from jax_w4a8 import ffi
    assert ffi.num_threads() == 1
    w = w4a8.quantize(np.random.default_rng(0).standard_normal((2048, 2048), np.float32), 64)
    dense, x = w4a8.pack_linear(w), np.ones((256, 2048), np.float32)
    layer = jax.jit(w4a8.linear)
    layer(x, dense).block_until_ready()
    for task in os.listdir("/proc/self/task"):  # what was started on one may use all now
        os.sched_setaffinity(int(task), {set(processors)!r})
    cpu, wall = time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < 1.0:
        layer(x, dense).block_until_ready()
    rate = (time.process_time() - cpu) / (time.perf_counter() - wall)
    assert rate < 1.3, rate
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={key: value for key, value in os.environ.items() if key not in ("NPROC", "PJRT_NPROC")},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
