"""How the kernels use threads, which public systems had complaints of.

Marks such as [F3] in comments are numbers of the project's list of known faults.
"""

from __future__ import annotations

import itertools
import time
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
def test_a_layer_is_one_call(tokens, top_k):  # [F11]
    layer, batch = random_layer(2).packed(), random_batch(tokens, top_k=top_k)
    text = jax.jit(w4a8.fused_experts).lower(*batch, layer).as_text()
    assert text.count("custom_call @jax_w4a8") == 1
    assert "stablehlo.dot" not in text


def test_no_other_thread_library_is_linked():  # [E8]
    library = Path(_native.__file__).read_bytes()
    for name in (b"libgomp", b"libomp", b"libiomp", b"libtbb"):
        assert name not in library
