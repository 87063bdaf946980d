"""The numeric contract at its limits, against integers and fractions: nothing here has a tolerance.

``nearest`` rounds an exact fraction to float32 by integer arithmetic alone, so that every fused multiply-add
of the kernels is checked against what it must be, subnormal numbers included.
"""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import LinearWeights, MoEConfig, QuantizedTensor
from jax_w4a8.experts.cpu_int4 import linear_p
from jax_w4a8.quantization import CODE_MAX, CODE_MIN, GROUP_MULTIPLE, MOST_GROUP_INPUTS

from .reference import (
    BACKENDS,
    SCHEMES,
    assert_same_bits,
    compiled,
    in_process,
    on_device,
    quantize_row,
    random_batch,
    random_layer,
)

pytestmark = pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here")
on_each_instruction_set = pytest.mark.parametrize("name", w4a8.instruction_sets())
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
on_each_scheme = pytest.mark.parametrize("scheme", SCHEMES)

INT32 = range(-(2**31), 2**31)
LARGEST = np.finfo(np.float32).max
SMALLEST = Fraction(1, 2**149)  # the smallest positive float32


def nearest(value: Fraction) -> np.float32:
    """The float32 next to a fraction, half to even: a whole number of the last place's units."""
    if value == 0:
        return np.float32(0)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    units = round(size / unit)  # Python rounds fractions half to even
    if units * unit >= 2**128:
        return np.float32(math.copysign(math.inf, value))
    return np.float32(
        math.copysign(math.ldexp(units, unit.numerator.bit_length() - unit.denominator.bit_length()), value)
    )


def exact(value: np.floating | int) -> Fraction:
    return Fraction(float(value)) if isinstance(value, np.floating) else Fraction(int(value))


def fused(a: np.floating | int, b: np.floating, c: np.floating) -> np.float32:
    return nearest(exact(a) * exact(b) + exact(c))


def plus(a: np.float32, b: np.float32) -> np.float32:
    return nearest(exact(a) + exact(b)) if np.isfinite(a) else a


def contract_linear(x: np.ndarray, weights: QuantizedTensor, bias: np.ndarray, scheme: str) -> np.ndarray:
    """Rules 1 to 3 for float32 rows: whole numbers, then one rounding for every operation that it names."""
    codes, scales = np.asarray(weights.codes, np.int64), np.asarray(weights.scale, np.float32)
    k = codes.shape[1]
    width = k if weights.group_size == -1 else weights.group_size
    parts = [slice(begin, begin + width) for begin in range(0, k, width)]
    y = np.zeros((len(x), len(codes)), np.float32)
    for (t, row), n in itertools.product(enumerate(x), range(len(codes))):
        values, zero, row_scale, _ = quantize_row(row, scheme)
        total = scaled_sum = np.float32(0)
        for part, scale in zip(parts, scales[n], strict=True):
            products = sum(int(v) * int(c) for v, c in zip(values[part], codes[n, part], strict=True))
            assert products in INT32
            total = fused(np.float32(products), scale, total)
            scaled_sum = plus(scaled_sum, nearest(exact(int(codes[n, part].sum())) * exact(scale)))
        total = fused(-np.float32(zero), scaled_sum, total)
        y[t, n] = plus(nearest(exact(total) * exact(np.float32(row_scale))), bias[n])
    return y


def run_linear(x, weights, bias=None, scheme="asymmetric", **static):
    packed = on_device(w4a8.pack_linear(weights, bias))
    return np.asarray(compiled.linear(x, packed, activation_scheme=scheme, **static))


def test_nearest_itself():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**31, 500, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    for value in values:
        assert nearest(exact(value)) == value
        middle = (exact(value) + exact(np.nextafter(value, np.float32(0)))) / 2
        even = [v for v in (value, np.nextafter(value, np.float32(0))) if not v.view(np.uint32) & 1]
        assert nearest(middle) == even[0]
        assert nearest(middle + Fraction(1, 2**200)) == value
    assert nearest(SMALLEST / 2) == 0
    assert nearest(SMALLEST * 3 / 2) == np.float32(2 * float(SMALLEST))
    assert nearest(Fraction(2) ** 128 - Fraction(2) ** 103) == np.inf
    assert nearest(Fraction(2) ** 128 - Fraction(2) ** 103 - 1) == LARGEST


# ---------------------------------------------------------------------------------------------------------
# Sums of products in 32 bits.

CODES = (CODE_MIN, CODE_MAX)
ACTIVATIONS = (-128, 127)
#: A row whose codes are all equal: its value, the scheme, the code, the zero point.
ROWS = {
    "lowest": (-1.0, "asymmetric", -128, 127),
    "highest": (1.0, "asymmetric", 127, -128),
    "positive": (127.0, "symmetric", 127, 0),
    "negative": (-127.0, "symmetric", -127, 0),
}


def test_widest_group_by_arithmetic():
    """All that kernels add up fits 32 bits at the limit, in whatever order, and not at twice the limit."""
    products = [a * c for a, c in itertools.product(ACTIVATIONS, CODES)]
    stored = [a * (c - CODE_MIN) for a, c in itertools.product(ACTIVATIONS, CODES)]
    starts = [CODE_MIN * a for a in ACTIVATIONS]  # what an accumulator starts from, per input
    for term in (*products, *stored, *starts):
        assert term * MOST_GROUP_INPUTS in INT32
    assert any(term * 2 * MOST_GROUP_INPUTS not in INT32 for term in stored)
    assert any(term * 2 * MOST_GROUP_INPUTS not in INT32 for term in products)
    # The sum of a group's codes, which the zero point is multiplied with, is exact in float32 besides.
    assert abs(CODE_MIN) * MOST_GROUP_INPUTS <= 2**24


@on_each_instruction_set
@pytest.mark.parametrize("tokens", [1, 9])  # one tile of rows, and several over decoded panels
@pytest.mark.parametrize("kind", ROWS)
def test_widest_group_with_extreme_codes(kind, tokens, name):
    value, scheme, code, zero = ROWS[kind]
    weights = QuantizedTensor(
        np.repeat(np.array([[CODE_MIN], [CODE_MAX], [0]], np.int8), MOST_GROUP_INPUTS, axis=1),
        np.ones((3, 1), np.float32),
    )
    x = np.full((tokens, MOST_GROUP_INPUTS), value, np.float32)
    assert quantize_row(x[0, :3], scheme)[0].tolist() == [code] * 3
    with w4a8.using_instruction_set(name):
        y = run_linear(x, weights, scheme=scheme)
    row_scale = quantize_row(x[0, :3], scheme)[2]
    sums = [(code - zero) * c * MOST_GROUP_INPUTS for c in (CODE_MIN, CODE_MAX, 0)]
    expected = [nearest(exact(nearest(Fraction(total))) * exact(row_scale)) for total in sums]
    assert y.tolist() == [[float(v) for v in expected]] * tokens


def test_widest_group_in_pure_jax():
    weights = QuantizedTensor(np.full((1, MOST_GROUP_INPUTS), CODE_MIN, np.int8), np.ones((1, 1), np.float32))
    x = np.full((1, MOST_GROUP_INPUTS), -1, np.float32)
    y = run_linear(x, weights, backend="xla")
    np.testing.assert_allclose(y, 8.0 * MOST_GROUP_INPUTS, rtol=1e-6)


def test_two_widest_groups():
    inputs = 2 * MOST_GROUP_INPUTS
    codes = np.full((1, inputs), CODE_MIN, np.int8)
    weights = QuantizedTensor(codes, np.array([[1, -0.5]], np.float32), MOST_GROUP_INPUTS)
    y = run_linear(np.full((1, inputs), -127, np.float32), weights, scheme="symmetric")
    assert y.tolist() == [[0.5 * 8 * 127 * MOST_GROUP_INPUTS]]


WIDER = MOST_GROUP_INPUTS + GROUP_MULTIPLE


def test_wider_groups_are_refused():
    message = rf"group_size must give at most {MOST_GROUP_INPUTS} inputs to a scale.*for {WIDER} inputs"
    wide = QuantizedTensor(np.zeros((2, WIDER), np.int8), np.ones((2, 1), np.float32))
    for size in (None, -1, WIDER):
        with pytest.raises(ValueError, match=message):
            w4a8.quantize(np.zeros((1, WIDER), np.float32), size)
    with pytest.raises(ValueError, match=message):
        w4a8.pack_linear(wide)
    with pytest.raises(ValueError, match=message):
        wide.dequantize()
    stack = QuantizedTensor(wide.codes[None], wide.scale[None])
    down = QuantizedTensor(np.zeros((1, WIDER, 1), np.int8), np.ones((1, WIDER, 1), np.float32))
    with pytest.raises(ValueError, match=message):
        w4a8.pack_experts(stack, down)
    with pytest.raises(ValueError, match=rf"at most {MOST_GROUP_INPUTS} inputs.*for 96 inputs"):
        w4a8.quantize(np.zeros((1, 96), np.float32), WIDER)
    w4a8.quantize(np.zeros((1, WIDER), np.float32), 128)


@pytest.mark.parametrize("shape", [(WIDER, 64), (64, WIDER)])
def test_the_oracle_refuses_wider_groups(shape):
    key = w4a8.QuantKey(jnp.int4, jnp.float32, w4a8.GroupShape(-1, 1))
    for answer in w4a8.explain(MoEConfig(4, 2, *shape), key):
        assert not answer.supported
        assert f"at most {MOST_GROUP_INPUTS} inputs to a scale" in answer.reason
    grouped = w4a8.QuantKey(jnp.int4, jnp.float32, w4a8.GroupShape(1, 128))
    assert all(answer.supported for answer in w4a8.explain(MoEConfig(4, 2, *shape), grouped))


def test_wider_groups_made_by_hand_are_refused():
    weights = LinearWeights(
        np.zeros((1, 1, 8 * WIDER), np.uint8),
        *(np.zeros(shape, np.float32) for shape in [(1, 1, 16), (1, 16), (1, 16)]),
        out_features=1,
        in_features=WIDER,
        group_size=-1,
    )
    x = np.zeros((1, WIDER), np.float32)
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=f"group_size must give at most {MOST_GROUP_INPUTS}"):
            w4a8.linear(x, weights, backend=backend)
    call = functools.partial(
        linear_p.bind, structure=jax.tree.structure(weights), activation_scheme="asymmetric"
    )
    message = (
        rf"INVALID_ARGUMENT.*weights.codes has groups of {WIDER} inputs, more than the {MOST_GROUP_INPUTS} "
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(call(*map(jnp.asarray, (x, *jax.tree.leaves(weights)))))


# ---------------------------------------------------------------------------------------------------------
# Every operation of the product, in fractions.


def random_case(seed, group_size, spread):
    """Rows and weights whose magnitudes span 2^-spread to 2^spread."""
    rng = np.random.default_rng(seed)
    n, k = 5, 107
    groups = 1 if group_size == -1 else math.ceil(k / group_size)

    def magnitudes(*shape):
        return (rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-spread, spread, shape)).astype(np.float32)

    weights = QuantizedTensor(rng.integers(-8, 8, (n, k), np.int8), magnitudes(n, groups), group_size)
    x = rng.normal(size=(7, k)).astype(np.float32) * np.abs(magnitudes(7, 1))
    x[1] = np.abs(x[1])
    x[2, ::7] *= 1000
    return x, weights, magnitudes(n)


@on_each_instruction_set
@on_each_scheme
@pytest.mark.parametrize("group_size", [32, 96, -1])
def test_products_in_fractions(group_size, scheme, name):
    for seed, spread in ((0, 2), (1, 20), (2, 60)):
        x, weights, bias = random_case(seed, group_size, spread)
        with w4a8.using_instruction_set(name):
            y = run_linear(x, weights, bias, scheme)
        assert_same_bits(y, contract_linear(x, weights, bias, scheme))


@on_each_instruction_set
@on_each_scheme
def test_products_of_rows_of_one_tile(scheme, name):
    """One row alone, whose kernel reads packed nibbles; the rows above went over decoded panels."""
    x, weights, bias = random_case(3, 32, 5)
    expected = contract_linear(x, weights, bias, scheme)
    with w4a8.using_instruction_set(name):
        for row in range(len(x)):
            assert_same_bits(run_linear(x[row : row + 1], weights, bias, scheme), expected[row : row + 1])


@on_each_instruction_set
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_subnormal_scales_and_results(dtype, name):
    """Nothing is flushed to zero: scales, sums, results down to 2^-149."""
    codes = np.resize(np.arange(-8, 8, dtype=np.int8), (4, 64))
    scale = np.array([[1e-45, 2e-45], [1e-40, -3e-39], [1.1754944e-38, 1e-38], [9e-41, 0]], np.float32)
    weights = QuantizedTensor(codes, scale.astype(dtype), 32)
    assert np.any((np.asarray(weights.scale, np.float32) != 0) & (np.abs(weights.scale) < 1.17e-38))
    x = np.random.default_rng(4).normal(size=(3, 64)).astype(np.float32)
    x[1] *= 1e-6
    with w4a8.using_instruction_set(name):
        y = run_linear(x, weights)
    assert_same_bits(y, contract_linear(x, weights, np.zeros(4, np.float32), "asymmetric"))
    assert np.any((y != 0) & (np.abs(y) < np.finfo(np.float32).tiny))


def subnormal_results_on_many_threads():
    assert w4a8.ffi.num_threads() == 4
    codes = np.resize(np.arange(-8, 8, dtype=np.int8), (2000, 64))
    weights = QuantizedTensor(codes, np.full((2000, 2), 1e-41, np.float32), 32)
    x = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32)
    alone = run_linear(x[:1], QuantizedTensor(codes[:16], weights.scale[:16], 32))
    assert alone.any()
    assert np.abs(alone).max() < np.finfo(np.float32).tiny
    for _ in range(20):
        y = run_linear(x, weights)
        assert_same_bits(y[:1], np.tile(alone, (1, 125)))


def test_subnormal_results_on_many_threads():
    """XLA's own threads flush subnormal numbers; a kernel on them doesn't."""
    in_process(subnormal_results_on_many_threads, NPROC="4")


# ---------------------------------------------------------------------------------------------------------
# The smallest and the largest magnitudes.


def ones(n=2, k=40, scale=1.0):
    return QuantizedTensor(np.ones((n, k), np.int8), np.full((n, 1), scale, np.float32))


@on_each_instruction_set
@on_each_scheme
def test_extents_at_both_ends(scheme, name):
    """The smallest extent that counts, and the largest that is finite; next to each, the other outcome."""
    smallest = np.float32(2.0**-100)
    x = np.zeros((6, 40), np.float32)
    x[0, 3] = smallest
    x[1, 3] = np.nextafter(smallest, np.float32(0))
    x[2, 3] = LARGEST
    x[3, 3:5] = LARGEST / 2, -LARGEST / 2  # an extent of LARGEST, both of it exact
    x[4, 3:5] = LARGEST, -LARGEST  # an extent of infinity, from end to end
    x[5, 3] = -LARGEST
    with w4a8.using_instruction_set(name):
        y = run_linear(x, ones(), scheme=scheme)
    finite = [0, 1, 2, 3, 5] if scheme == "asymmetric" else [*range(6)]
    expected = contract_linear(x[finite], ones(), np.zeros(2, np.float32), scheme)
    assert_same_bits(y[finite], expected)
    assert y[0, 0] > 0
    assert_same_bits(y[1], np.zeros(2, np.float32))
    # 127 times LARGEST / 127 rounds to infinity, 255 times 1 / (255 / LARGEST) does not.
    assert (y[2, 0] == np.inf) == (scheme == "symmetric")
    if scheme == "asymmetric":
        assert np.isnan(y[4]).all()


@on_each_backend
def test_extents_just_beyond_the_largest(backend):
    """high - low of LARGEST is finite; half a unit more rounds, to even, to infinity."""
    half = np.float32(2.0**127)
    x = np.zeros((2, 40), np.float32)
    x[:, 3] = half
    x[1, 4] = -np.nextafter(half, np.float32(0))
    x[0, 4] = np.nextafter(x[1, 4], np.float32(0))
    assert -np.float64(x[0, 4]) + half == LARGEST
    y = run_linear(x, ones(), backend=backend)
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


@on_each_backend
def test_results_beyond_float32_are_infinite_and_stay_in_their_row_and_channel(backend):
    weights = QuantizedTensor(np.ones((2, 40), np.int8), np.array([[1e30], [1]], np.float32))
    x = np.ones((3, 40), np.float32)
    x[1] = 1e20
    y = run_linear(x, weights, scheme="symmetric", backend=backend)
    assert y[1, 0] == np.inf
    np.testing.assert_allclose(y[1, 1], 4e21, rtol=1e-6)
    np.testing.assert_allclose(y[[0, 2], 0], 4e31, rtol=1e-6)


@on_each_backend
def test_scales_at_both_ends(backend):
    tiny = np.finfo(np.float32).tiny
    y = run_linear(np.ones((1, 40), np.float32), ones(scale=float(tiny)), backend=backend)
    np.testing.assert_allclose(y, 40 * float(tiny), rtol=1e-6)
    y = run_linear(np.full((1, 40), 2.0**-10, np.float32), ones(scale=1e34), backend=backend)
    np.testing.assert_allclose(y, 40 * 1e34 / 1024, rtol=1e-6)
    # By the contract's order, the sum times the weight's scale comes before the row's scale.
    y = run_linear(np.full((1, 40), 2.0**-10, np.float32), ones(scale=float(LARGEST)), backend=backend)
    assert not np.isfinite(y).any()


@pytest.mark.parametrize(
    ("scheme", "backend"), [("symmetric", "cpu_int4"), ("asymmetric", "cpu_int4"), ("asymmetric", "xla")]
)
def test_experts_on_the_largest_and_smallest_tokens(scheme, backend):
    """Scales that undo the token's magnitude: what is in between is ordinary, and so is the result."""
    layer = random_layer(6, magnitude=0.02)
    batch = random_batch(4)
    plain = compiled.fused_experts(*batch, layer.packed(), activation_scheme=scheme, backend=backend)
    for exponent in (-95, 115):
        w13 = QuantizedTensor(layer.w13.codes, np.ldexp(layer.w13.scale, -exponent), 32)
        moved = layer._replace(w13=w13).packed()
        x = np.ldexp(batch.x, exponent)
        y = compiled.fused_experts(
            x, batch.weights, batch.ids, moved, activation_scheme=scheme, backend=backend
        )
        if backend == "cpu_int4":  # powers of two commute with every rounding
            assert_same_bits(y, plain)
        else:
            np.testing.assert_allclose(y, plain, rtol=1e-4, atol=1e-5 * np.abs(plain).max())


# ---------------------------------------------------------------------------------------------------------
# Roundings.


@on_each_instruction_set
def test_every_half_step_rounds_to_even(name):
    """All ties of both schemes, each in every lane of a vector and in the tail."""
    symmetric = np.arange(-127, 127) + 0.5
    asymmetric = np.arange(0, 255) + 0.5
    for scheme, ties, ends in (("symmetric", symmetric, [127]), ("asymmetric", asymmetric, [255, 0])):
        row = np.concatenate([ends, ties]).astype(np.float32)
        k = len(row)
        x = np.stack([np.roll(row, shift) for shift in range(17)])
        eye = QuantizedTensor(np.eye(k, dtype=np.int8), np.ones((k, 1), np.float32))
        with w4a8.using_instruction_set(name):
            y = run_linear(x, eye, scheme=scheme)
        for shift in range(17):
            found = np.roll(y[shift], -shift)[len(ends) :]
            np.testing.assert_array_equal(found, np.rint(ties))  # numpy's rint is half to even


def halves(dtype):
    """Every finite value of a 16-bit dtype, in ascending order of its bits, positive."""
    largest = np.array(jnp.finfo(dtype).max, dtype).view(np.uint16)
    return np.arange(int(largest) + 1, dtype=np.uint16).view(dtype).astype(np.float64)


@on_each_instruction_set
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_halfway_between_two_halves_round_to_even(dtype, name):
    """All middles between neighbouring values, subnormal ones too, and what is next to each middle."""
    values = halves(dtype)
    middles = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    exactly = middles.astype(np.float64) == (values[:-1] + values[1:]) / 2
    assert exactly.mean() > 0.99  # the smallest middle of bfloat16 is no float32
    middles, lower, upper = middles[exactly], values[:-1][exactly], values[1:][exactly]
    even = np.where(np.arange(2**15)[: len(values) - 1][exactly] % 2 == 0, lower, upper)
    above, below = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(0))
    rows = np.concatenate([middles, above, below, -middles])
    expected = np.concatenate([even, upper, lower, -even])
    width = 4096
    rows = np.pad(rows, (0, -len(rows) % width)).reshape(-1, 1, width)
    with w4a8.using_instruction_set(name):
        y = np.asarray(compiled.combine(rows, np.ones((len(rows), 1), np.float32), dtype=dtype))
    found = y.astype(np.float64).reshape(-1)[: len(expected)]
    np.testing.assert_array_equal(found, expected)


@on_each_instruction_set
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_results_beyond_the_largest_half(dtype, name):
    """Up to the middle to the next power of two a result is the largest value; from there on, infinity."""
    largest = halves(dtype)[-1]
    step = largest - halves(dtype)[-2]
    middle = np.float32(largest + step / 2)
    x = np.array([middle, np.nextafter(middle, np.float32(0)), -middle], np.float32)[:, None, None]
    with w4a8.using_instruction_set(name):
        y = np.asarray(compiled.combine(x, np.ones((3, 1), np.float32), dtype=dtype), np.float64)
    assert y.ravel().tolist() == [np.inf, largest, -np.inf]


@on_each_instruction_set
def test_combine_in_fractions(name):
    """A fused multiply-add for each slot, ascending."""
    rng = np.random.default_rng(7)
    slots = (rng.normal(size=(6, 5, 21)) * 2.0 ** rng.integers(-30, 30, (6, 5, 1))).astype(np.float32)
    weights = rng.normal(size=(6, 5)).astype(np.float32)
    with w4a8.using_instruction_set(name):
        y = np.asarray(compiled.combine(slots, weights))
    expected = np.zeros((6, 21), np.float32)
    for (t, column), _ in np.ndenumerate(expected):
        for slot in range(5):
            expected[t, column] = fused(weights[t, slot], slots[t, slot, column], expected[t, column])
    assert_same_bits(y, expected)
