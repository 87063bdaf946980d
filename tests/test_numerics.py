"""The numeric core against tests/reference.py, and the arithmetic faults that public systems had.

Marks such as [A11] in comments are numbers of the project's list of known faults.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import Activation, MoEConfig, QuantizedTensor, Routing

from . import reference
from .reference import (
    BACKENDS,
    SCHEMES,
    Layer,
    assert_rows_close,
    assert_same_bits,
    compiled,
    in_process,
    on_device,
    random_batch,
    random_layer,
    random_weights,
    relative_error,
)

pytestmark = pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here")
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
on_each_scheme = pytest.mark.parametrize("scheme", SCHEMES)

#: Relative L2. The contract lets the backends differ by 1e-5; both do better.
TOLERANCE = 1e-6
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
GROUP_SIZES = (32, 64, 96, 128, 256, -1)

#: What an error status of a custom call is raised as, by the running jaxlib's choice.
NATIVE_ERRORS = (jax.errors.JaxRuntimeError, ValueError)

fused_experts, apply_experts = compiled.fused_experts, compiled.apply_experts
linear, combine = compiled.linear, compiled.combine


def cases(native, xla):
    """Parameters with a backend: all that matter for one, few for the one that takes seconds to compile."""
    return [(*case, "cpu_int4") for case in native] + [(*case, "xla") for case in xla]


def packed(weights, bias=None):
    return on_device(w4a8.pack_linear(weights, bias))


def constant(shape, code=1, scale=1.0):
    """Weights of one code and one scale, channel-wise."""
    scales = np.full((*shape[:-1], 1), scale, np.float32)
    return QuantizedTensor(np.full(shape, code, np.int8), scales, -1)


# ---------------------------------------------------------------------------------------------------------
# Rule 1, seen through an identity matrix.

COLUMNS = 67  # a vector's tail of 3


def seen(x, scheme, backend):
    """(code - zero) * scale in float32: what a weight of 1 makes of each value."""
    eye = QuantizedTensor(np.eye(COLUMNS, dtype=np.int8), np.ones((COLUMNS, 1), np.float32), -1)
    rows = np.zeros((140, COLUMNS), np.float32)  # one shape to compile
    rows[: len(x)] = x
    return np.asarray(linear(rows, packed(eye), activation_scheme=scheme, backend=backend))[: len(x)]


def expected(x, scheme):
    """The same by tests/reference.py: whole numbers and row scales."""
    rows = reference.quantize_rows(x, scheme)
    return rows.codes - rows.zero[:, None], rows.scale[:, None]


def rows_of_every_kind():
    rng = np.random.default_rng(0)
    steps = np.arange(COLUMNS)
    normal = rng.normal(size=(24, COLUMNS))
    balanced = normal.copy()
    balanced[:, 0], balanced[:, -1] = 5, -5
    balanced *= rng.uniform(0.1, 10, (24, 1))
    kinds = [
        normal,
        normal * 10.0 ** rng.uniform(-25, 30, (24, 1)),  # all magnitudes
        balanced,  # low = -high, where the zero point is close to a tie
        [10 + steps / COLUMNS, -10 - steps / COLUMNS],  # one sign
        [np.append(steps[:-1] + 0.5, 127), np.append(-steps[:-1] - 0.5, 127)],  # ties [A1]
        [np.append(steps[:-1] * 3 + 0.5, 255), np.append(steps[:-1] - 100.5, 154)],
        [np.resize([127, 0.9, -0.9, 1.9, -1.9, 0.1], COLUMNS)],  # no truncation [A2]
        [np.full(COLUMNS, 3.7), np.full(COLUMNS, -3.7), np.eye(COLUMNS)[66] * 3.7],
        normal.astype(jnp.bfloat16),  # ties are common
        normal.astype(np.float16),
    ]
    return np.concatenate([np.asarray(kind, np.float32) for kind in kinds])


@on_each_backend
@on_each_scheme
def test_codes_and_scales_of_rows(scheme, backend):
    x = rows_of_every_kind()
    y = seen(x, scheme, backend)
    whole, scale = expected(x, scheme)
    np.testing.assert_array_equal(np.rint(y / scale), whole)
    np.testing.assert_allclose(y, whole * scale, rtol=4e-7)
    if backend == "cpu_int4":  # XLA rewrites 1 / (255 / x)
        assert_same_bits(y, (whole + 0.0).astype(np.float32) * scale.astype(np.float32))


@on_each_backend
def test_codes_by_hand(backend):  # [A2]
    x = np.zeros((1, COLUMNS), np.float32)
    x[0, :7] = 127, 0.9, -0.9, 1.9, 2.5, -3.5, 0.5
    assert seen(x, "symmetric", backend)[0, :7].tolist() == [127, 1, -1, 2, 2, -4, 0]
    x[0, :7] = 255, 0.9, 254.4, 1.9, 2.5, 3.5, 0.5
    assert seen(x, "asymmetric", backend)[0, :7].tolist() == [255, 1, 254, 2, 2, 4, 0]


@on_each_backend
def test_schemes_differ_on_a_row_of_one_sign(backend):  # [0.5]
    x = np.random.default_rng(1).uniform(10, 11, (4, COLUMNS)).astype(np.float32)
    for scheme, step in (("asymmetric", 1 / 255), ("symmetric", 1 / 127)):
        worst = np.abs(seen(x, scheme, backend) - x).max() / x.max()
        assert 0.4 * step < worst < 0.51 * step


@on_each_backend
@on_each_scheme
def test_rows_too_small_for_a_scale_are_zero(scheme, backend):
    smallest, below = np.float32(2.0**-100), np.nextafter(np.float32(2.0**-100), np.float32(0))
    x = np.zeros((6, COLUMNS), np.float32)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = smallest, -smallest, below, -below
    x[4], x[5, ::2] = 1e-40, -1e-45
    y = seen(x, scheme, backend)
    np.testing.assert_allclose(y[:2], x[:2], rtol=2e-7)
    assert_same_bits(y[2:], np.zeros((4, COLUMNS), np.float32))


@on_each_backend
@on_each_scheme
def test_largest_rows_keep_their_values(scheme, backend):
    x = np.zeros((4, COLUMNS), np.float32)
    x[0], x[1], x[2, ::3], x[3, 1::3] = 3.4e38, -3.4e38, 3e38, -3e38
    np.testing.assert_allclose(seen(x, scheme, backend), x, rtol=2e-7)


@on_each_backend
def test_a_row_whose_range_overflows_is_nan(backend):
    # high - low is infinity: so are the row's scale and, times codes - zero = 0, its values NaN.
    x = np.ones((3, COLUMNS), np.float32)
    x[1, :2] = 3e38, -3e38
    y = seen(x, "asymmetric", backend)
    assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[[0, 2]], 1, rtol=2e-7)


# ---------------------------------------------------------------------------------------------------------
# The dense layer.


@pytest.mark.parametrize(
    ("group_size", "scheme", "backend"),
    cases(
        itertools.product([*GROUP_SIZES, 512], SCHEMES),  # [A6]
        [(32, "symmetric"), (96, "asymmetric"), (512, "asymmetric"), (-1, "symmetric")],
    ),
)
def test_linear(group_size, scheme, backend):
    rng = np.random.default_rng(2)
    weights = random_weights(rng, (70, 600), group_size)  # the last group is always short
    bias = rng.normal(size=70).astype(np.float32)
    x = random_batch(9, 600).x
    y = linear(x, packed(weights, bias), activation_scheme=scheme, backend=backend)
    value = reference.linear(x, weights, bias, scheme)
    assert_rows_close(y, value, TOLERANCE)
    assert relative_error(y, value) < TOLERANCE


@pytest.mark.parametrize(
    ("n", "k", "group_size", "backend"),
    cases(
        itertools.product([2, 6, 10, 34, 70, 1, 17], [80, 100, 33, 1, 7], [32, -1]),  # [A7] [A9]
        [(2, 80, 32), (10, 31, -1)],
    ),
)
def test_linear_of_odd_shapes(n, k, group_size, backend):
    weights = random_weights(np.random.default_rng(3), (n, k), group_size)
    x = random_batch(3, k).x
    y = linear(x, packed(weights), backend=backend)
    assert_rows_close(y, reference.linear(x, weights), TOLERANCE)


@pytest.mark.parametrize(("k", "group_size"), [(192, 64), (704, 128), (1344, 192)])
@pytest.mark.parametrize("rows", [*range(1, 15), 31, 257])  # [A31]
def test_linear_of_any_number_of_rows(rows, k, group_size):  # [A8]
    weights = random_weights(np.random.default_rng(4), (40, k), group_size)
    x = random_batch(rows, k).x
    assert_rows_close(linear(x, packed(weights)), reference.linear(x, weights), TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "backend"),
    cases(itertools.product(DTYPES, DTYPES), zip(DTYPES, DTYPES[::-1], strict=True)),
)
def test_linear_dtypes(dtype, scale_dtype, backend):  # [0.4]
    weights = random_weights(np.random.default_rng(5), (40, 256), 64, scale_dtype)
    x = random_batch(7, 256, dtype=dtype).x
    y = linear(x, packed(weights), backend=backend)
    assert y.dtype == dtype
    assert_rows_close(y, reference.linear(x.astype(np.float32), weights), TOLERANCE)


@on_each_backend
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_linear_is_rounded_once(dtype, backend):
    weights = packed(constant((3, 40), 7, [[0.25], [-0.3], [1e4]]))  # the last overflows float16
    x = random_batch(50, 40, dtype=dtype).x
    wide = np.asarray(linear(x.astype(np.float32), weights, backend=backend))
    with np.errstate(over="ignore"):
        assert_same_bits(linear(x, weights, backend=backend), wide.astype(dtype))


@pytest.mark.parametrize(
    ("tokens", "scheme", "backend"), cases(itertools.product([1, 2], SCHEMES), [(1, "asymmetric")])
)
def test_every_group_has_its_own_scale(tokens, scheme, backend):  # [A3]
    scale = np.tile(np.array([1, 2, 4, 8], np.float32), (5, 1))
    weights = packed(QuantizedTensor(np.ones((5, 256), np.int8), scale, 64))
    x = np.ones((tokens, 256), np.float32)
    y = linear(x, weights, activation_scheme=scheme, backend=backend)
    np.testing.assert_allclose(y, np.full((tokens, 5), 960), rtol=3e-7)


@on_each_backend
def test_scales_are_not_rounded(backend):  # [0.2]
    scale = (1 + np.arange(48) * 2.0**-12).astype(np.float32).reshape(16, 3)
    weights = packed(QuantizedTensor(np.ones((16, 96), np.int8), scale, 32))
    y = np.asarray(linear(np.ones((1, 96), np.float32), weights, backend=backend))[0]
    np.testing.assert_allclose(y, 32 * scale.astype(np.float64).sum(1), rtol=3e-7)
    assert len(set(y.tolist())) == 16


EXTREMES = {
    # signs of the row, codes of the weights, exact sum of products with codes of +-127
    "highest": ([1], [-8], -8 * 127 * 4096),
    "lowest": ([-1], [-8], 8 * 127 * 4096),
    "alternating": ([1, -1], [7, -8], 15 * 127 * 2048),
    "pairs": ([1, 1, -1, -1], [7, 7, -8, -8], 15 * 127 * 2048),
}


@pytest.mark.parametrize("name", w4a8.instruction_sets())
@pytest.mark.parametrize("groups", [1, 128, 4])
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_codes_do_not_saturate(kind, groups, name):  # [A11]
    signs, codes, total = EXTREMES[kind]
    tensor = QuantizedTensor(
        np.tile(np.resize(codes, 4096), (3, 1)).astype(np.int8), np.ones((3, groups), np.float32)
    )
    x = np.float32(127) * np.resize(signs, (1, 4096)).astype(np.float32)
    with w4a8.using_instruction_set(name):
        y = np.asarray(linear(x, packed(tensor), activation_scheme="symmetric"))
    assert y.tolist() == [[total] * 3]


@pytest.mark.parametrize("name", w4a8.instruction_sets())
def test_lowest_code_does_not_saturate(name):  # [A11]
    # x = -1 has the zero point 127 and the code -128, which is twice -8 x 16.
    with w4a8.using_instruction_set(name):
        y = np.asarray(linear(-np.ones((1, 4096), np.float32), packed(constant((3, 4096), -8))))
    total = np.float32(8 * 255 * 4096) * (np.float32(1) / np.float32(255))
    assert y.tolist() == [[total] * 3]


@on_each_backend
def test_large_equal_tokens_stay_finite(backend):  # [A13]
    weights = random_weights(np.random.default_rng(6), (20, 2048), 64, magnitude=1e-6)
    x = np.full((2, 2048), 3e4, np.float32)
    y = linear(x, packed(weights), backend=backend)
    assert_rows_close(y, reference.linear(x, weights), TOLERANCE)


@pytest.mark.parametrize(("scheme", "backend"), cases([[scheme] for scheme in SCHEMES], [["asymmetric"]]))
def test_one_huge_channel(scheme, backend):  # [A17]
    weights = random_weights(np.random.default_rng(7), (40, 512), 64)
    x = random_batch(4, 512).x
    x[:, 77] = 1e4
    y = linear(x, packed(weights), activation_scheme=scheme, backend=backend)
    assert_rows_close(y, reference.linear(x, weights, scheme=scheme), 1e-5)
    x[:, 77] = 0
    plain = x @ reference.dequantized(weights).T
    rest = np.asarray(y) - 1e4 * reference.dequantized(weights)[:, 77]
    assert relative_error(rest, plain) > 0.3  # the other channels are lost to the step of 1e4 / 255


@on_each_backend
def test_half_precision_input_adds_up_in_float32(backend):  # [A28]
    x = np.ones((2, 8192), np.float16)
    y = linear(x, packed(constant((3, 8192))), backend=backend)
    assert y.dtype == jnp.float16
    assert np.asarray(y).tolist() == [[8192] * 3] * 2


@on_each_backend
def test_negative_scales(backend):  # [A29]
    weights = random_weights(np.random.default_rng(8), (24, 96), 32)
    flipped = QuantizedTensor(weights.codes, -weights.scale, 32)
    x = random_batch(5, 96).x
    y = linear(x, packed(weights), backend=backend)
    np.testing.assert_array_equal(linear(x, packed(flipped), backend=backend), -y)


@on_each_backend
@pytest.mark.parametrize("scale", [1e-30, 1e30, -1e-30])
def test_scales_beyond_float16(scale, backend):  # [C14]
    weights = random_weights(np.random.default_rng(9), (24, 96), 32)
    scales = (weights.scale / np.float32(0.02) * scale).astype(jnp.bfloat16)
    weights = QuantizedTensor(weights.codes, scales, 32)
    x = random_batch(5, 96).x
    y = linear(x, packed(weights), backend=backend)
    assert_rows_close(y, reference.linear(x, weights), TOLERANCE)


def test_subnormal_scales_of_the_native_backend():  # XLA flushes subnormal numbers on CPU
    tiny = np.full((24, 3), 2.0**-130, np.float32)
    weights = QuantizedTensor(np.full((24, 96), 5, np.int8), tiny, 32)
    x = np.full((5, 96), 2.0**30, np.float32)
    y = linear(x, packed(weights))
    np.testing.assert_allclose(y, np.full((5, 24), 5 * 96 * 2.0**-100), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# The expert call.


@pytest.mark.parametrize(
    ("group_size", "scheme", "biased", "backend"),
    cases(
        itertools.product(GROUP_SIZES, SCHEMES, [False, True]),
        [(32, "symmetric", True), (96, "asymmetric", True), (-1, "symmetric", False)],
    ),
)
@pytest.mark.parametrize(("hidden", "inner"), [(100, 34), (320, 288)])
def test_experts(hidden, inner, group_size, scheme, biased, backend):
    layer = random_layer(10, 5, hidden, inner, group_size, biased=biased)
    batch = random_batch(12, hidden, 5, top_k=3)
    y = fused_experts(*batch, layer.packed(), activation_scheme=scheme, backend=backend)
    assert_rows_close(y, reference.fused_experts(*batch, layer, scheme=scheme), TOLERANCE)


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(2, 34), (6, 70), (10, 2), (34, 6), (70, 10), (1, 1), (17, 15)]
)
def test_experts_of_odd_shapes(hidden, inner, group_size):  # [A9]
    layer = random_layer(11, 3, hidden, inner, group_size, biased=True)
    batch = random_batch(8, hidden, 3)
    y = fused_experts(*batch, layer.packed())
    assert_rows_close(y, reference.fused_experts(*batch, layer), TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "group_size", "backend"),
    cases(
        itertools.product(DTYPES, DTYPES, [32, -1]),
        [(jnp.float32, jnp.bfloat16, -1), (jnp.bfloat16, jnp.float16, 32), (jnp.float16, jnp.float32, 32)],
    ),
)
def test_expert_dtypes(dtype, scale_dtype, group_size, backend):  # [0.4]
    layer = random_layer(12, group_size=group_size, scale_dtype=scale_dtype, biased=True)
    x, weights, ids = random_batch(dtype=dtype)
    y = fused_experts(x, weights, ids, layer.packed(), backend=backend)
    assert y.dtype == dtype
    exact = reference.fused_experts(x.astype(np.float32), weights, ids, layer)
    assert_rows_close(y, exact, TOLERANCE)


@on_each_backend
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_experts_are_rounded_once(dtype, backend):
    layer = random_layer(12, biased=True).packed()
    x, weights, ids = random_batch(dtype=dtype)
    wide = np.asarray(fused_experts(x.astype(np.float32), weights, ids, layer, backend=backend))
    assert_same_bits(fused_experts(x, weights, ids, layer, backend=backend), wide.astype(dtype))


def test_router_weights_and_ids_of_other_dtypes():
    layer = random_layer(13).packed()
    x, weights, ids = random_batch()
    weights = weights.astype(jnp.bfloat16)
    y = fused_experts(x, weights.astype(np.float32), ids, layer)
    for dtype in (np.int8, np.uint8, np.int16, np.uint32, np.int64):
        assert_same_bits(fused_experts(x, weights, ids.astype(dtype), layer), y)


@pytest.mark.parametrize(
    ("scheme", "tokens", "backend"),
    cases([("asymmetric", 257), ("symmetric", 30)], [("asymmetric", 5)]),
)
def test_experts_at_a_model_s_size(scheme, tokens, backend):  # [A32]
    layer = random_layer(14, 8, 2048, 768, 128, jnp.bfloat16)
    batch = random_batch(tokens, 2048, 8)
    y = fused_experts(*batch, layer.packed(), activation_scheme=scheme, backend=backend)
    assert_rows_close(y, reference.fused_experts(*batch, layer, scheme=scheme), TOLERANCE)


@on_each_backend
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("chosen", [[3, 3], [3, 0], [0, 0], [-1, 3]])
def test_idle_experts(chosen, tokens, backend):  # [A26]
    layer = random_layer(15, biased=True)
    x, weights, _ = random_batch(tokens)
    ids = np.tile(np.array(chosen, np.int32), (tokens, 1))
    y = fused_experts(x, weights, ids, layer.packed(), backend=backend)
    assert_rows_close(y, reference.fused_experts(x, weights, ids, layer), TOLERANCE)


@pytest.mark.parametrize(
    ("lead", "backend"), cases([[()], [(3, 3)], [(2, 0, 3)], [(1, 1, 1, 9)]], [[()], [(3, 3)]])
)
def test_leading_axes(lead, backend):
    layer = random_layer(16).packed()
    batch = random_batch(math.prod(lead))
    x, weights, ids = (part.reshape(*lead, part.shape[-1]) for part in batch)
    y = fused_experts(x, weights, ids, layer, backend=backend)
    assert y.shape == (*lead, 64)
    assert_same_bits(y.reshape(-1, 64), fused_experts(*batch, layer, backend=backend))
    w = packed(random_weights(np.random.default_rng(0), (10, 64)))
    assert linear(x, w, backend=backend).shape == (*lead, 10)
    if backend == "cpu_int4":
        slots = apply_experts(x, ids, layer)
        assert slots.shape == (*lead, 2, 64)
        assert_same_bits(combine(slots, weights), y)


# ---------------------------------------------------------------------------------------------------------
# Activations, one pair of gate and up at a time.

SILU_LIKE = ("silu", "gelu", "gelu_tanh")
SWIGLUOAI = [
    Activation("swigluoai", alpha, limit)
    for alpha, limit in itertools.product([1.702, 1.0], [7.0, 10.0, None, 0.5])
]
GATES = (-20, -7, 0, 7, 20, -12, -8, -5, -3, -2, -1, -0.5, -0.01, -0.0, 1e-6, 0.01, 0.5, 1, 2, 3, 5, 8)
UPS = (-20, -7, 0, 7, 20, 1, -0.3)


def through_one_channel(gates, ups, activation, backend):
    """activation(gate, up) of all pairs: experts with one inner channel, whose biases are the pair.

    A row of one number survives its quantisation but for rounding.
    """
    pairs = np.array(list(itertools.product(gates, ups)), np.float32)
    count = len(pairs)
    layer = Layer(constant((count, 2, 1), 0), constant((count, 1, 1), 1), pairs)
    x, weights = np.zeros((count, 1), np.float32), np.ones((count, 1), np.float32)
    ids = np.arange(count, dtype=np.int32)[:, None]
    y = fused_experts(
        x, weights, ids, layer.packed(), activation=activation, activation_scheme="symmetric", backend=backend
    )
    return np.asarray(y)[:, 0], reference.activate(*pairs.T.astype(np.float64), activation)


@pytest.mark.parametrize(
    ("activation", "backend"),
    cases(
        [[activation] for activation in (*SILU_LIKE, *SWIGLUOAI)],
        [[activation] for activation in (*SILU_LIKE, SWIGLUOAI[0], SWIGLUOAI[6])],
    ),
    ids=str,
)
def test_activation_formulas(activation, backend):  # [B15]
    y, exact = through_one_channel(GATES, UPS, activation, backend)
    np.testing.assert_allclose(y, exact, rtol=5e-6, atol=2.0**-99)


@on_each_backend
@pytest.mark.parametrize("activation", [*SILU_LIKE, SWIGLUOAI[0]], ids=str)
def test_activations_of_huge_gates(activation, backend):
    gates = np.resize([-1e30, -1e20, -1e10, -1e6, -1e3, 1e3, 1e10, 1e20], len(GATES))
    ups = np.resize([1, -1e7], len(UPS))
    y, exact = through_one_channel(gates, ups, activation, backend)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=2.0**-99)


@pytest.mark.parametrize("activation", [*SILU_LIKE, *SWIGLUOAI], ids=str)
def test_random_pairs_of_gate_and_up(activation):
    gates, ups = np.random.default_rng(17).normal(size=(2, 60)) * 4
    y, exact = through_one_channel(gates, ups, activation, "cpu_int4")
    np.testing.assert_allclose(y, exact, rtol=5e-6, atol=2.0**-99)


@pytest.mark.parametrize(
    ("activation", "backend"),
    cases([[activation] for activation in (*SILU_LIKE, *SWIGLUOAI)], [["gelu"], [SWIGLUOAI[6]]]),
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["chunked", "interleaved"])
def test_experts_with_each_activation(interleaved, activation, backend):
    layer = random_layer(18, 4, 96, 40, -1, biased=True, magnitude=0.05)
    order = np.arange(80).reshape(2, 40).T.ravel() if interleaved else np.arange(80)
    w13 = QuantizedTensor(layer.w13.codes[:, order], layer.w13.scale[:, order])
    stored = Layer(w13, layer.w2, layer.w13_bias[:, order], layer.w2_bias)
    batch = random_batch(6, 96)
    y = fused_experts(*batch, stored.packed(interleaved), activation=activation, backend=backend)
    assert_rows_close(y, reference.fused_experts(*batch, layer, activation), TOLERANCE)


@pytest.mark.parametrize(("scheme", "backend"), cases([[scheme] for scheme in SCHEMES], [["asymmetric"]]))
def test_tiny_inner_rows_leave_the_bias(scheme, backend):
    layer = random_layer(19, magnitude=1e-20)
    bias = np.random.default_rng(19).normal(size=(4, 64)).astype(np.float32)
    layer = layer._replace(w2_bias=bias).packed()
    x, _, ids = random_batch()
    slots = apply_experts(x, ids, layer, activation_scheme=scheme, backend=backend)
    assert_same_bits(slots, bias[ids])


# ---------------------------------------------------------------------------------------------------------
# Router weights: on the input, in the combine.


@on_each_backend
@on_each_scheme
def test_router_weight_on_input_exactly(scheme, backend):  # [B13]
    layer = Layer(constant((1, 2, 1)), constant((1, 1, 1))).packed()  # gate = up = x
    x, weights = np.array([[2.0]], np.float32), np.array([[0.3]], np.float32)
    ids = np.zeros((1, 1), np.int32)
    static = {"activation_scheme": scheme, "backend": backend}
    on_input = fused_experts(x, weights, ids, layer, apply_router_weight_on_input=True, **static)
    assert float(on_input[0, 0]) == pytest.approx(0.6 * 0.6 / (1 + math.exp(-0.6)), rel=1e-6)
    assert float(on_input[0, 0]) == pytest.approx(0.2324, abs=5e-5)
    on_output = fused_experts(x, weights, ids, layer, **static)
    assert float(on_output[0, 0]) == pytest.approx(1.0570, abs=5e-5)


@pytest.mark.parametrize(("dtype", "backend"), cases([[dtype] for dtype in DTYPES], [[jnp.float32]]))
def test_router_weight_on_input(dtype, backend):
    layer = random_layer(20, biased=True)
    x, weights, ids = random_batch(top_k=1, dtype=dtype)
    ids[4] = -1
    static = {"apply_router_weight_on_input": True, "backend": backend}
    y = fused_experts(x, weights, ids, layer.packed(), **static)
    exact = reference.fused_experts(x.astype(np.float32), weights, ids, layer, on_input=True)
    assert_rows_close(y, exact, TOLERANCE)
    slots = apply_experts(x, ids, layer.packed(), weights=weights, **static)
    assert_same_bits(combine(slots, np.ones_like(weights), dtype=dtype, backend=backend), y)


@pytest.mark.parametrize(
    ("top_k", "dtype", "backend"),
    cases(itertools.product([1, 2, 7], DTYPES), [(2, jnp.float32), (2, jnp.bfloat16)]),
)
def test_fused_experts_equal_combined_slots(top_k, dtype, backend):
    layer = random_layer(21, biased=True)
    x, weights, ids = random_batch(9, 64, 4, top_k, dtype)
    ids[3, 0] = ids[7] = -1
    slots = apply_experts(x, ids, layer.packed(), backend=backend)
    exact = reference.apply_experts(x.astype(np.float32), ids, layer)
    assert slots.dtype == jnp.float32
    assert_rows_close(slots, exact, TOLERANCE)
    assert_same_bits(slots[7], np.zeros((top_k, 64), np.float32))
    y = fused_experts(x, weights, ids, layer.packed(), backend=backend)
    assert_same_bits(combine(slots, weights, dtype=dtype, backend=backend), y)
    assert_same_bits(y[7], np.zeros(64, dtype))


@on_each_backend
def test_combine_adds_in_float32_in_order(backend):  # [0.3]
    slots = np.tile(np.array([2.0**24, 1, -(2.0**24), 1], np.float32)[None, :, None], (1, 1, 19))
    ones = np.ones((1, 4), np.float32)
    for order, total in (([0, 1, 2, 3], 1), ([0, 2, 1, 3], 2), ([1, 3, 0, 2], 2)):
        y = combine(slots[:, order], ones, backend=backend)
        assert np.asarray(y).tolist() == [[total] * 19]
    y = combine(slots[:, [0, 2, 1, 3]] / 2, 2 * ones, dtype=jnp.bfloat16, backend=backend)
    assert np.asarray(y, np.float32).tolist() == [[2] * 19]


@on_each_backend
def test_combine_rounds_once(backend):
    # 1 + 2^-8 + 2^-20 rounds up to bfloat16's 1 + 2^-7; each step rounded would give 1.
    slots = np.array([1, 2.0**-8, 2.0**-20], np.float32)[None, :, None]
    y = combine(slots, np.ones((1, 3), np.float32), dtype=jnp.bfloat16, backend=backend)
    assert float(y[0, 0]) == 1 + 2.0**-7


@on_each_backend
def test_w2_bias_is_weighted_by_the_router(backend):  # [B16]
    bias = random_layer(22, biased=True).w2_bias
    layer = random_layer(22, magnitude=0.0)._replace(w2_bias=bias)
    x, weights, ids = random_batch()
    ids[2, 1] = ids[5] = -1
    weights[4, 0] = 0
    y = fused_experts(x, weights, ids, layer.packed(), backend=backend)
    factors = np.where(ids < 0, 0, weights)[..., None]
    np.testing.assert_allclose(y, (bias[ids] * factors).sum(1), rtol=1e-6, atol=1e-6)


@on_each_backend
def test_both_biases_matter(backend):  # [B16]
    layer = random_layer(23, biased=True)
    batch = random_batch()
    y = fused_experts(*batch, layer.packed(), backend=backend)
    for name in ("w13_bias", "w2_bias"):
        without = layer._replace(**{name: None})
        other = fused_experts(*batch, without.packed(), backend=backend)
        assert_rows_close(other, reference.fused_experts(*batch, without), TOLERANCE)
        assert relative_error(other, np.asarray(y, np.float64)) > 0.1


@on_each_backend
def test_gate_and_up_are_not_interchangeable(backend):  # [C18]
    layer = random_layer(24)
    order = np.roll(np.arange(192), 96)
    w13 = QuantizedTensor(layer.w13.codes[:, order], layer.w13.scale[:, order], 32)
    batch = random_batch()
    y = fused_experts(*batch, layer.packed(), backend=backend)
    z = fused_experts(*batch, layer._replace(w13=w13).packed(), backend=backend)
    assert relative_error(z, np.asarray(y, np.float64)) > 0.1


@on_each_backend
def test_layer_with_a_scaling_factor(backend):  # [A19]
    layer = random_layer(25).packed()
    x = random_batch(top_k=1).x
    logits = np.random.default_rng(25).normal(size=(9, 4)).astype(np.float32)
    routing = Routing(top_k=1, routed_scaling_factor=1.5)
    run = jax.jit(functools.partial(w4a8.moe, routing=routing, backend=backend))
    assert np.isnan(run(np.full_like(x, np.nan), logits, layer)).all()
    ids = logits.argmax(1)[:, None].astype(np.int32)
    y = fused_experts(x, np.full((9, 1), 1.5, np.float32), ids, layer, backend=backend)
    for _ in range(50):
        assert_same_bits(run(x, logits, layer), y)


# ---------------------------------------------------------------------------------------------------------
# Rows that hold nothing, or nothing usable.


@pytest.mark.parametrize(
    ("scheme", "biased", "backend"),
    cases(itertools.product(SCHEMES, [False, True]), [("asymmetric", False), ("asymmetric", True)]),
)
def test_zero_rows(scheme, biased, backend):  # [A15]
    layer = random_layer(26, biased=biased)
    x, weights, ids = random_batch()
    static = {"activation_scheme": scheme, "backend": backend}
    x[2] = x[4] = 0
    x[5] = -0.0
    y = np.asarray(fused_experts(x, weights, ids, layer.packed(), **static))
    assert_rows_close(y, reference.fused_experts(x, weights, ids, layer, scheme=scheme), TOLERANCE)
    alone = np.asarray(fused_experts(np.zeros_like(x), weights, ids, layer.packed(), **static))
    assert_same_bits(y[[2, 4, 5]], alone[[2, 4, 5]])
    if not biased:
        assert_same_bits(alone, np.zeros((9, 64), np.float32))
    x[:] = 2.0**-102
    x[:, ::2] *= -1
    assert_same_bits(fused_experts(x, weights, ids, layer.packed(), **static), alone)
    bias = np.random.default_rng(26).normal(size=10).astype(np.float32)
    w = packed(random_weights(np.random.default_rng(26), (10, 64)), bias)
    assert_same_bits(linear(x, w, **static), np.tile(bias, (9, 1)))


BAD_VALUES = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize(
    ("dtype", "scheme", "backend"),
    cases(itertools.product(DTYPES, SCHEMES), [(jnp.float32, "asymmetric")]),
)
def test_bad_values_stay_in_their_rows(dtype, scheme, backend):  # [B19]
    layer = random_layer(27, biased=True).packed()
    x, weights, ids = random_batch(dtype=dtype)
    w = packed(random_weights(np.random.default_rng(27), (10, 64)))
    static = {"activation_scheme": scheme, "backend": backend}
    clean = [fused_experts(x, weights, ids, layer, **static), linear(x, w, **static)]
    rows = [0, 4, 5, 8]
    for value, column in itertools.product(BAD_VALUES, (0, 37, 63)):
        spoilt = x.copy()
        spoilt[rows, column] = value
        results = [fused_experts(spoilt, weights, ids, layer, **static), linear(spoilt, w, **static)]
        for y, before in zip(results, clean, strict=True):
            assert np.isnan(np.asarray(y, np.float32)[rows]).all()
            assert_same_bits(np.delete(y, rows, 0), np.delete(before, rows, 0))


@on_each_backend
def test_overflow_between_the_projections_stays_in_its_slot(backend):
    layer = random_layer(28)
    x, _, ids = random_batch()
    clean = np.asarray(apply_experts(x, ids, layer.packed(), backend=backend))
    scale = layer.w13.scale.copy()
    scale[2] = 1e30
    layer = layer._replace(w13=QuantizedTensor(layer.w13.codes, scale, 32))
    slots = np.asarray(apply_experts(x, ids, layer.packed(), backend=backend))
    assert np.isnan(slots[ids == 2]).all()
    assert (ids == 2).any()
    assert_same_bits(slots[ids != 2], clean[ids != 2])


@on_each_backend
def test_bad_router_weight_stays_in_its_row(backend):  # [A14]
    layer = random_layer(29).packed()
    x, weights, ids = random_batch()
    clean = np.asarray(fused_experts(x, weights, ids, layer, backend=backend))
    weights[1, 1], weights[3, 0] = np.nan, np.inf
    y = np.asarray(fused_experts(x, weights, ids, layer, backend=backend))
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[3]).any()
    assert_same_bits(np.delete(y, [1, 3], 0), np.delete(clean, [1, 3], 0))


def test_scratch_of_a_spoilt_call_does_not_show():  # [A18]
    layer = random_layer(30, hidden=100, inner=34, biased=True).packed()
    batch = random_batch(40, 100)
    w = packed(random_weights(np.random.default_rng(30), (34, 100)))
    y, z = fused_experts(*batch, layer), linear(batch.x, w)
    for tokens in (40, 300):
        spoilt = random_batch(tokens, 100)
        spoilt.x[:] = np.nan
        assert np.isnan(fused_experts(*spoilt, layer)).all()
        assert np.isnan(linear(spoilt.x, w)).all()
        assert_same_bits(fused_experts(*batch, layer), y)
        assert_same_bits(linear(batch.x, w), z)


def print_results():
    layer = random_layer(31, hidden=100, inner=34, biased=True).packed()
    batch = random_batch(9, 100)
    for group_size in (32, -1):
        w = packed(random_weights(np.random.default_rng(31), (34, 100), group_size))
        print(reference.bits(linear(batch.x, w)).sum())
    print(reference.bits(fused_experts(*batch, layer)).sum())


def test_fresh_memory_does_not_show():  # [A18]
    outputs = {in_process(print_results, MALLOC_PERTURB_=byte) for byte in ("0", "85")}
    assert len(outputs) == 1


# ---------------------------------------------------------------------------------------------------------
# Expert ids.

WRONG_IDS = (4, -2, 2**31 - 1, -(2**31))


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_wrong_ids_are_errors_of_the_native_backend(wrong):  # [A21]
    layer = random_layer(32).packed()
    x, weights, ids = random_batch()
    ids[1, 0] = -1
    y = fused_experts(x, weights, ids, layer)
    spoilt = ids.copy()
    spoilt[3, 1] = wrong
    message = rf"INVALID_ARGUMENT.*expert id {wrong} of token 3, slot 1 is outside \[-1, 4\)"
    for run in (fused_experts, w4a8.fused_experts):
        with pytest.raises(NATIVE_ERRORS, match=message):
            run(x, weights, spoilt, layer).block_until_ready()
    with pytest.raises(NATIVE_ERRORS, match=message):
        apply_experts(x, spoilt, layer).block_until_ready()
    assert_same_bits(fused_experts(x, weights, ids, layer), y)


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_wrong_ids_are_nan_rows_of_the_pure_jax_backend(wrong):  # [A21]
    layer = random_layer(32).packed()
    x, weights, ids = random_batch()
    ids[1, 0] = -1
    y = np.asarray(fused_experts(x, weights, ids, layer, backend="xla"))
    ids[3, 1] = wrong
    z = np.asarray(fused_experts(x, weights, ids, layer, backend="xla"))
    assert np.isnan(z[3]).all()
    assert_same_bits(np.delete(z, 3, 0), np.delete(y, 3, 0))


@pytest.mark.parametrize("wrong", [2**32, 2**32 + 1, -(2**32), 2**63 - 1])
def test_wide_ids_do_not_wrap_round(wrong):  # [A21]
    x, weights, _ = random_batch(2)
    ids = np.array([[0, 1], [2, wrong]], np.int64)
    layer = random_layer(32).packed()
    with pytest.raises((*NATIVE_ERRORS, OverflowError)):
        w4a8.fused_experts(x, weights, ids, layer).block_until_ready()


@on_each_backend
def test_absent_experts_add_nothing(backend):
    layer = random_layer(33, biased=True)
    x, weights, ids = random_batch()
    ids[:, 0] = -1
    y = fused_experts(x, weights, ids, layer.packed(), backend=backend)
    exact = reference.fused_experts(x, weights[:, 1:], ids[:, 1:], layer)
    assert_rows_close(y, exact, TOLERANCE)
    weights[:, 0] = np.nan  # a shard's leftover
    assert_same_bits(fused_experts(x, weights, ids, layer.packed(), backend=backend), y)


# ---------------------------------------------------------------------------------------------------------
# Sizes and choices.


def lazily_stacked(last, count):
    """`last` behind count - 1 matrices of zeros, in memory that nobody pays for before it is touched."""
    shape = (count, *last.shape[1:])
    size = math.prod(shape) * last.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    stack = np.frombuffer(pages, last.dtype).reshape(shape)
    stack[-1:] = last
    shared = jnp.from_dlpack(stack)
    if shared.unsafe_buffer_pointer() != stack.ctypes.data:
        pytest.skip("this jax copies host arrays")
    return shared


@pytest.mark.skipif(not hasattr(mmap, "MAP_ANONYMOUS"), reason="needs anonymous memory maps")
@on_each_backend
def test_experts_beyond_four_gigabytes(backend):  # [A22]
    experts = 8400
    one = w4a8.pack_experts(*random_layer(34, 1, 512, 1024, -1))
    many = jax.tree.map(lambda leaf: lazily_stacked(leaf, experts), one)
    assert many.w13.codes.nbytes > 2**32
    assert many.w2.codes.nbytes > 2**31
    x, weights, ids = random_batch(3, 512, 1)
    y = fused_experts(x, weights, ids, on_device(one), backend=backend)
    assert_same_bits(fused_experts(x, weights, ids + experts - 1, many, backend=backend), y)


def run_with_many_threads():
    assert w4a8.ffi.num_threads() == 64
    rng = np.random.default_rng(35)
    for n, k in ((8, 32768), (40, 16384)):
        weights = random_weights(rng, (n, k), 64)
        for rows in (1, 3):
            x = random_batch(rows, k).x
            y = linear(x, packed(weights))
            assert_rows_close(y, reference.linear(x, weights), 2 * TOLERANCE)
    layer = random_layer(35, 2, 8, 8192, 64)
    batch = random_batch(1, 8, 2)
    y = fused_experts(*batch, layer.packed())
    assert_rows_close(y, reference.fused_experts(*batch, layer), 2 * TOLERANCE)


def test_more_threads_than_work():  # [A23]
    in_process(run_with_many_threads, NPROC="64")


@pytest.mark.parametrize("dtype", [*DTYPES, np.float64, np.int8])
@pytest.mark.parametrize("group_size", [-1, 32, 160, 48])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu"])
def test_what_the_oracle_accepts_runs(activation, group_size, dtype):  # [A24]
    config = MoEConfig(4, 2, 96, 40, in_dtype=dtype, activation=activation)
    key = w4a8.QuantKey(jnp.int4, jnp.bfloat16, w4a8.GroupShape.from_group_size(group_size))
    native, other = w4a8.explain(config, key)
    accepted = dtype in DTYPES and activation != "relu" and group_size != 48
    assert (native.supported, other.supported) == (accepted, accepted)
    if not accepted:
        with pytest.raises(NotImplementedError, match=r"CPU_INT4: no, .*XLA: no, "):
            w4a8.select_w4a8_int8_moe_backend(config, key)
        return
    chosen, _ = w4a8.select_w4a8_int8_moe_backend(config, key)
    assert chosen is w4a8.W4A8Int8MoeBackend.CPU_INT4
    layer = random_layer(36, 4, 96, 40, group_size, jnp.bfloat16)
    x, weights, ids = random_batch(2, 96, dtype=dtype)
    y = fused_experts(x, weights, ids, layer.packed(), activation=activation)
    exact = reference.fused_experts(x.astype(np.float32), weights, ids, layer, activation)
    assert_rows_close(y, exact, TOLERANCE)


def test_the_native_path_is_chosen():  # [F4]
    layer, batch = random_layer(37).packed(), random_batch()
    w = packed(random_weights(np.random.default_rng(37), (10, 64)))
    assert "jax_w4a8_fused_experts" in fused_experts.lower(*batch, layer).as_text()
    assert "jax_w4a8_apply_experts" in apply_experts.lower(batch.x, batch.ids, layer).as_text()
    assert "jax_w4a8_linear" in linear.lower(batch.x, w).as_text()
    slots = np.ones((9, 2, 64), np.float32)
    assert "jax_w4a8_combine" in combine.lower(slots, batch.weights).as_text()
    assert "custom_call" not in fused_experts.lower(*batch, layer, backend="xla").as_text()
