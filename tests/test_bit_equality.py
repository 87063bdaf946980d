"""A token's result is the same to the bit, whatever the batch around it, the threads, the instruction set."""

from __future__ import annotations

import contextlib
import itertools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import Activation, QuantizedTensor

from .reference import (
    SCHEMES,
    assert_same_bits,
    compiled,
    in_process,
    on_device,
    random_batch,
    random_layer,
    random_weights,
)

pytestmark = pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here")

INSTRUCTION_SETS = w4a8.instruction_sets()
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ACTIVATIONS = ("silu", "swigluoai", "gelu", "gelu_tanh", Activation("swigluoai", 1.0, None))


def packed_linear(n, k, group_size, scale_dtype=np.float32):
    rng = np.random.default_rng(k)
    bias = rng.normal(size=n).astype(np.float32)
    return on_device(w4a8.pack_linear(random_weights(rng, (n, k), group_size, scale_dtype), bias))


def by_token(run, batch):
    """Every token's result when it is alone."""
    rows = [run(*(part[t : t + 1] for part in batch)) for t in range(len(batch[0]))]
    return np.concatenate([np.asarray(row) for row in rows])


# ---------------------------------------------------------------------------------------------------------
# Instruction sets.


@pytest.mark.parametrize("tokens", [1, 5, 23])
@pytest.mark.parametrize(
    ("dtype", "group_size", "scheme"), [*itertools.product(DTYPES, [32, 128, -1], SCHEMES)]
)
def test_instruction_sets_on_experts(dtype, group_size, scheme, tokens):
    scale_dtype = jnp.bfloat16 if group_size == 32 else jnp.float32
    layer = random_layer(0, 3, 150, 70, group_size, scale_dtype, biased=True).packed()
    x, weights, ids = random_batch(tokens, 150, 3, dtype=dtype)
    results = []
    for name in INSTRUCTION_SETS:
        with w4a8.using_instruction_set(name):
            assert w4a8.instruction_set() == name
            y = compiled.fused_experts(x, weights, ids, layer, activation_scheme=scheme)
            results.append(np.asarray(y))
    for name, y in zip(INSTRUCTION_SETS, results, strict=True):
        assert_same_bits(y, results[0], name)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_instruction_sets_on_activations(activation):
    """Gates and ups of all magnitudes, seen as slots before the combine."""
    layer = random_layer(1, 2, 40, 70, -1, biased=True, magnitude=0.4).packed()
    batch = random_batch(60, 40, 2)
    batch.x[:] *= 10.0 ** np.random.default_rng(1).uniform(-30, 25, (60, 1))
    results = []
    for name in INSTRUCTION_SETS:
        with w4a8.using_instruction_set(name):
            y = compiled.apply_experts(batch.x, batch.ids, layer, activation=activation)
            results.append(np.asarray(y))
    assert np.isfinite(results[0]).any()
    for name, y in zip(INSTRUCTION_SETS, results, strict=True):
        assert_same_bits(y, results[0], name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_on_every_value_of_a_dtype(dtype):
    """Conversions and quantisation: all 2^16 halves, or floats of all exponents."""
    if dtype == jnp.float32:
        values = np.random.default_rng(2).integers(0, 2**32, 2**16, np.uint32).view(np.float32)
    else:
        values = np.arange(2**16, dtype=np.uint16).view(dtype)
    x = np.random.default_rng(3).permutation(values).reshape(-1, 64)
    x[::2] = np.where(np.isfinite(x[::2].astype(np.float32)), x[::2], np.zeros((), dtype))
    weights = packed_linear(5, 64, 32)
    results = []
    for name, scheme in itertools.product(INSTRUCTION_SETS, SCHEMES):
        with w4a8.using_instruction_set(name):
            results.append(np.asarray(compiled.linear(x, weights, activation_scheme=scheme)))
    for i, y in enumerate(results):
        assert_same_bits(y, results[i % 2], INSTRUCTION_SETS[i // 2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_on_rounding_to_a_dtype(dtype):
    """The combine of single slots of weight 1: float32 of all exponents, rounded."""
    values = np.random.default_rng(4).integers(0, 2**32, (37, 1, 61), np.uint32).view(np.float32)
    ones = np.ones((37, 1), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values[:, 0].astype(dtype)
    number = ~np.isnan(values[:, 0])
    for name in INSTRUCTION_SETS:
        with w4a8.using_instruction_set(name):
            y = np.asarray(compiled.combine(values, ones, dtype=dtype))
        assert_same_bits(np.where(number, y, 0) + 0, np.where(number, expected, 0) + 0, name)
        assert np.isnan(y[~number].astype(np.float32)).all()


# ---------------------------------------------------------------------------------------------------------
# Batches.

#: K of 600 and 1100 take two and three panels of 512 inputs, which groups of 640 and 96 straddle.
LAYERS = [
    # H, I, group size, scale dtype, dtype, scheme, activation
    (64, 96, 32, jnp.bfloat16, jnp.float32, "asymmetric", "silu"),
    (100, 34, 32, jnp.float32, jnp.bfloat16, "symmetric", "swigluoai"),
    (600, 40, 96, jnp.float32, jnp.float16, "asymmetric", "gelu"),
    (40, 1100, 640, jnp.bfloat16, jnp.float32, "symmetric", "gelu_tanh"),
    (1100, 600, -1, jnp.float32, jnp.bfloat16, "asymmetric", "silu"),
]


@pytest.mark.parametrize(
    ("hidden", "inner", "group_size", "scale_dtype", "dtype", "scheme", "activation"), LAYERS
)
def test_tokens_do_not_depend_on_the_batch(hidden, inner, group_size, scale_dtype, dtype, scheme, activation):
    layer = random_layer(5, 2, hidden, inner, group_size, scale_dtype, biased=True).packed()
    batch = random_batch(40, hidden, 2, dtype=dtype)

    def run(x, weights, ids):
        return compiled.fused_experts(x, weights, ids, layer, activation=activation, activation_scheme=scheme)

    alone = by_token(run, batch)
    for tokens in range(1, 41):
        assert_same_bits(run(*(part[:tokens] for part in batch)), alone[:tokens], f"T = {tokens}")


@pytest.mark.parametrize(
    ("n", "k", "group_size", "dtype", "scheme"),
    [
        (40, 64, 32, jnp.float32, "asymmetric"),
        (33, 100, -1, jnp.bfloat16, "symmetric"),
        (70, 600, 64, jnp.float16, "asymmetric"),
        (20, 1100, -1, jnp.float32, "symmetric"),
        (20, 1100, 544, jnp.bfloat16, "asymmetric"),
    ],
)
def test_rows_of_linear_do_not_depend_on_the_batch(n, k, group_size, dtype, scheme):
    weights = packed_linear(n, k, group_size)
    x = random_batch(40, k, dtype=dtype).x

    def run(x):
        return compiled.linear(x, weights, activation_scheme=scheme)

    alone = by_token(run, [x])
    for rows in range(1, 41):
        assert_same_bits(run(x[:rows]), alone[:rows], f"T = {rows}")


@pytest.mark.parametrize(
    ("hidden", "inner", "group_size", "scale_dtype", "dtype", "scheme", "activation"), LAYERS
)
def test_permutations(hidden, inner, group_size, scale_dtype, dtype, scheme, activation):
    layer = random_layer(6, 4, hidden, inner, group_size, scale_dtype, biased=True).packed()
    x, weights, ids = random_batch(25, hidden, 4, top_k=3, dtype=dtype)
    ids[::5, 1] = -1
    static = {"activation": activation, "activation_scheme": scheme}
    y = np.asarray(compiled.fused_experts(x, weights, ids, layer, **static))
    rng = np.random.default_rng(6)
    for _ in range(4):
        rows = rng.permutation(25)
        assert_same_bits(compiled.fused_experts(x[rows], weights[rows], ids[rows], layer, **static), y[rows])
        experts = rng.permutation(4)
        moved = jax.tree.map(lambda leaf: leaf[np.argsort(experts)], layer)  # noqa: B023
        new_ids = np.where(ids < 0, -1, experts[ids]).astype(np.int32)
        assert_same_bits(compiled.fused_experts(x, weights, new_ids, moved, **static), y)
    slots = np.asarray(compiled.apply_experts(x, ids, layer, **static))
    turned = compiled.apply_experts(x, ids[:, ::-1].copy(), layer, **static)
    assert_same_bits(turned, slots[:, ::-1])


@pytest.mark.parametrize("tokens", [255, 257, 600])
@pytest.mark.parametrize(("hidden", "inner", "group_size"), [(64, 40, 32), (600, 40, -1)])
def test_one_hot_expert(hidden, inner, group_size, tokens):
    """More rows of one expert than a piece of work takes (256)."""
    layer = random_layer(7, 3, hidden, inner, group_size).packed()
    x, weights, _ = random_batch(tokens, hidden, 3)
    ids = np.tile(np.array([1, 1], np.int32), (tokens, 1))
    ids[::7, 0] = 2
    y = np.asarray(compiled.fused_experts(x, weights, ids, layer))
    for begin in (0, 13, 201, tokens - 9):
        part = slice(begin, begin + 9)
        assert_same_bits(compiled.fused_experts(x[part], weights[part], ids[part], layer), y[part])
    row = compiled.linear(x, packed_linear(40, hidden, group_size))
    assert_same_bits(compiled.linear(x[-5:], packed_linear(40, hidden, group_size)), row[-5:])


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_outputs_that_are_stored_past_the_caches(name):
    """Slots' inner and outer rows are above 8 MiB each; those of a tenth of the tokens are not."""
    layer, batch = random_layer(12, 2, 1024, 1024, 128).packed(), random_batch(1100, 1024, 2)
    assert 4 * 1024 * batch.ids.size > 8 << 20
    with w4a8.using_instruction_set(name):
        whole = np.asarray(compiled.fused_experts(*batch, layer))
        parts = [
            np.asarray(compiled.fused_experts(*(part[first : first + 110] for part in batch), layer))
            for first in range(0, 1100, 110)
        ]
    assert_same_bits(np.concatenate(parts), whole)


def test_more_tokens_than_a_pass_takes():
    """2048 at a time."""
    layer = random_layer(8, 3, 40, 33, 32).packed()
    batch = random_batch(4200, 40, 3)
    batch.ids[1000:3000:3] = -1
    y = np.asarray(compiled.fused_experts(*batch, layer))
    slots = np.asarray(compiled.apply_experts(batch.x, batch.ids, layer))
    for begin in (0, 2040, 2048, 4090, 4191):
        part = slice(begin, begin + 9)
        some = [array[part] for array in batch]
        assert_same_bits(compiled.fused_experts(*some, layer), y[part])
        assert_same_bits(compiled.apply_experts(some[0], some[2], layer), slots[part])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_scales_of_equal_value(dtype):  # [C13]
    layer = random_layer(9, scale_dtype=dtype)
    wide = layer._replace(
        w13=QuantizedTensor(layer.w13.codes, layer.w13.scale.astype(np.float32), 32),
        w2=QuantizedTensor(layer.w2.codes, layer.w2.scale.astype(np.float32), 32),
    )
    batch = random_batch()
    y = compiled.fused_experts(*batch, layer.packed())
    assert_same_bits(compiled.fused_experts(*batch, wide.packed()), y)


# ---------------------------------------------------------------------------------------------------------
# Threads. XLA's pool has as many as there are processors, so these run where NPROC says 8.

LIMITS = (1, 2, 3, 7)
LARGE = [
    # T, E, k, H, I, group size, dtype, scheme
    (1, 8, 8, 512, 256, 64, jnp.float32, "asymmetric"),  # one token
    (40, 4, 2, 320, 288, 32, jnp.bfloat16, "symmetric"),
    (300, 2, 1, 256, 96, -1, jnp.float16, "asymmetric"),  # few hot experts
    (13, 3, 2, 1100, 640, -1, jnp.float32, "symmetric"),  # three panels
    (2100, 2, 1, 32, 32, 32, jnp.float32, "asymmetric"),  # two passes
]


def processor_time():
    """Clock ticks that each thread of this process has run, by its id."""
    ticks = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
            ticks[task.name] = int(user) + int(system)
    return ticks


def large_calls():
    """Makes large calls; yields the time after every twenty."""
    layer = random_layer(10, 8, 512, 512, 128).packed()
    batch = random_batch(512, 512, 8)
    while True:
        for _ in range(20):
            compiled.fused_experts(*batch, layer).block_until_ready()
        yield time.monotonic()


def busy_threads(enough):
    """How many threads work in large calls: looks for 20 seconds, or until it has seen enough."""
    calls = large_calls()
    begin, before = next(calls), processor_time()
    for now in calls:
        busy = sum(ticks > before.get(task, 0) for task, ticks in processor_time().items())
        if busy >= enough or now > begin + 20:
            return busy


def processors_used():
    """How many processors large calls keep busy, on average over half a second."""
    calls = large_calls()
    begin, before = next(calls), time.process_time()
    for now in calls:
        if now > begin + 0.5:
            return (time.process_time() - before) / (now - begin)


def check_threads():
    assert w4a8.ffi.num_threads() == 8
    if Path("/proc/self/task").exists():
        with w4a8.thread_limit(7):
            assert busy_threads(enough=7) >= 7
    with w4a8.thread_limit(1):
        assert processors_used() < 1.2
    for tokens, experts, top_k, hidden, inner, group_size, dtype, scheme in LARGE:
        layer = random_layer(11, experts, hidden, inner, group_size, biased=True).packed()
        x, weights, ids = random_batch(tokens, hidden, experts, top_k, dtype)
        w = packed_linear(2 * inner, hidden, group_size)
        results = []
        for name, limit in itertools.product(INSTRUCTION_SETS, LIMITS):
            with w4a8.using_instruction_set(name), w4a8.thread_limit(limit):
                for _ in range(1 if name == "portable" else 8):
                    y = compiled.fused_experts(x, weights, ids, layer, activation_scheme=scheme)
                    z = compiled.linear(x, w, activation_scheme=scheme)
                    results.append((f"{name}, {limit} threads", np.asarray(y), np.asarray(z)))
        for message, y, z in results:
            assert_same_bits(y, results[0][1], message)
            assert_same_bits(z, results[0][2], message)


def test_threads():
    in_process(check_threads, NPROC="8")


@pytest.mark.parametrize("limit", [0, -1])
def test_thread_limit_is_checked(limit):
    with pytest.raises(ValueError, match=f"limit must be at least 1, got {limit}"), w4a8.thread_limit(limit):
        pass
