"""How the kernels use threads, which public systems had complaints of.

Marks such as [F3] in comments are numbers of the project's list of known faults.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import _native

from .reference import compiled, in_process, random_batch, random_layer
from .test_bit_equality import processor_time

pytestmark = pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here")


def busy_threads(call, enough: int) -> int:
    """How many threads work in repeated calls: looks for 20 seconds, or until it has seen enough."""
    before, start = processor_time(), time.monotonic()
    while True:
        for _ in range(20):
            call().block_until_ready()
        busy = sum(ticks > before.get(task, 0) for task, ticks in processor_time().items())
        if busy >= enough or time.monotonic() > start + 20:
            return busy


def check_few_experts_use_all_threads() -> None:
    assert w4a8.ffi.num_threads() == 4
    layer = random_layer(0, 2, 1024, 1024, 128, jnp.bfloat16).packed()
    for tokens, top_k in ((1, 1), (1, 2), (64, 1)):
        x, weights, _ = random_batch(tokens, 1024, 2, top_k)
        ids = np.tile(
            np.arange(top_k, dtype=np.int32), (tokens, 1)
        )  # one or two experts, whatever the tokens
        call = lambda x=x, weights=weights, ids=ids: compiled.fused_experts(x, weights, ids, layer)  # noqa: E731
        call().block_until_ready()
        assert busy_threads(call, enough=4) >= 4, (tokens, top_k)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads' time in /proc")
def test_few_experts_use_all_threads():  # [F1] [F3]
    in_process(check_few_experts_use_all_threads, NPROC="4")


def check_nothing_spins_between_calls() -> None:
    layer, batch = random_layer(1, 8, 512, 512, 128).packed(), random_batch(64, 512, 8)
    for _ in range(5):
        compiled.fused_experts(*batch, layer).block_until_ready()
        time.sleep(0.01)  # helpers that found nothing to do have left
        start = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - start < 0.1  # of 0.4 s on each of four threads


def test_nothing_spins_between_calls():  # [F6]
    in_process(check_nothing_spins_between_calls, NPROC="4")


@pytest.mark.parametrize(("tokens", "top_k"), [*itertools.product([1, 100], [1, 2])])
def test_a_layer_is_one_call(tokens, top_k):  # [F11] [F2]
    layer, batch = random_layer(2).packed(), random_batch(tokens, top_k=top_k)
    text = jax.jit(w4a8.fused_experts).lower(*batch, layer).as_text()
    assert text.count("custom_call @jax_w4a8") == 1
    for copying in ("dot", "gather", "concatenate", "sort", "scatter"):
        assert f"stablehlo.{copying}" not in text


def test_tokens_are_not_copied_for_each_of_their_experts():  # [F2]
    tokens, hidden, top_k = 512, 1024, 8
    layer = random_layer(3, 8, hidden, 32, 128).packed()
    w4a8.release_scratch()
    sizes = []
    for k in (1, top_k):
        batch = random_batch(tokens, hidden, 8, k)
        compiled.fused_experts(*batch, layer).block_until_ready()
        sizes.append(w4a8.release_scratch())
    # What grows with top_k is a slot's own: its f32 output, its inner row, its place in the order. Blocks are
    # of whole huge pages; a copy of the tokens' codes for each slot would be 3.5 MiB.
    assert sizes[1] - sizes[0] < (top_k - 1) * tokens * (4 * hidden + 32 * 8 + 64) + (2 << 20)
    assert sizes[1] > sizes[0] > tokens * hidden


def ends_while_the_lock_is_held(call: Callable[[], jax.Array]) -> bool:
    """Whether a call that was begun ends while this thread never lets go of the interpreter's lock."""
    call().block_until_ready()
    start = time.perf_counter()
    call().block_until_ready()
    enough = 1 + 20 * (time.perf_counter() - start)
    sys.setswitchinterval(1000)  # nobody may ask for the lock between two steps
    y = call()
    ctypes.PyDLL(None).usleep(int(1e6 * enough))  # through PyDLL it keeps the lock while it sleeps
    return y.is_ready()


def check_a_call_needs_no_interpreter() -> None:
    layer, batch = random_layer(4, 4, 1024, 1024, 128).packed(), random_batch(2048, 1024, 4)
    assert ends_while_the_lock_is_held(lambda: compiled.fused_experts(*batch, layer))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="wants a C library with usleep")
def test_a_call_needs_no_interpreter():  # [E11]
    in_process(check_a_call_needs_no_interpreter, NPROC="4")


def check_packed_pages_are_touched_by_several_threads() -> None:
    import resource  # not on every system

    codes = np.zeros((16, 2048, 2048), np.int8)
    w13 = w4a8.QuantizedTensor(codes, np.ones((16, 2048, 16), np.float32), 128)
    w2 = w4a8.QuantizedTensor(codes[:, :, :1024], np.ones((16, 2048, 8), np.float32), 128)
    touched, pack = collections.Counter[int](), _native.pack_codes

    def counting(*arguments):  # pages that this thread is the first to touch
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        result = pack(*arguments)
        touched[threading.get_ident()] += resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
        return result

    _native.pack_codes = counting
    for _ in range(10):
        touched.clear()
        w4a8.pack_experts(w13, w2)
        found = sorted(touched.values())
        if len(found) > 1 and found[-2] > sum(found) / 8:
            return
    raise AssertionError(f"one thread touches nearly all pages: {found}")


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads' page faults")
def test_packed_pages_are_touched_by_several_threads():  # [F7]
    in_process(check_packed_pages_are_touched_by_several_threads, NPROC="4")


def test_no_other_thread_library_is_linked():  # [E8]
    library = Path(_native.__file__).read_bytes()
    for name in (b"libgomp", b"libomp", b"libiomp", b"libtbb"):
        assert name not in library
