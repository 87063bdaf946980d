"""INT4 codes and scales: the rule, the spellings of a group size, what is refused."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_w4a8 as w4a8
from jax_w4a8 import GroupShape, QuantizedTensor, QuantKey

from . import reference

NAN = float("nan")
#: Compiled once per shape, instead of an operation at a time.
quantize = jax.jit(w4a8.quantize, static_argnames=("group_size", "scale_dtype"))
dequantize = jax.jit(w4a8.dequantize)


def random_floats(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def reference_quantize(w, group_size, scale_dtype):
    """The rule, weight by weight, for ``[N, K]``."""
    n, k = w.shape
    width = k if group_size == -1 else group_size
    codes = np.zeros((n, k), np.int8)
    scale = np.zeros((n, math.ceil(k / width)), scale_dtype)
    for row, group in np.ndindex(*scale.shape):
        part = slice(group * width, min(k, (group + 1) * width))
        largest = max(abs(np.float32(x)) for x in w[row, part])
        scale[row, group] = np.float32(largest) / np.float32(7.5)
        divisor = np.float32(scale[row, group])
        for column in range(part.start, part.stop):
            if divisor > 0:
                ratio = np.float32(w[row, column]) / divisor
                codes[row, column] = min(max(np.rint(ratio), -8), 7)
    return codes, scale


# ---------------------------------------------------------------------------------------------------------
# The rule.


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 96, -1])
@pytest.mark.parametrize("k", [96, 100])
def test_rule(k, group_size, scale_dtype):
    w = random_floats((3, k)) * np.float32(0.02)
    w[1, :40] = 0  # a group of zeros, for groups of 32
    q = quantize(w, group_size, scale_dtype=scale_dtype)
    codes, scale = reference_quantize(w, -1 if group_size == k else group_size, scale_dtype)
    assert q.codes.dtype == jnp.int8
    np.testing.assert_array_equal(q.codes, codes)
    np.testing.assert_array_equal(np.asarray(q.scale, np.float32), scale.astype(np.float32))
    assert q.scale.dtype == scale_dtype


def test_rule_by_hand():
    w = np.zeros((2, 32), np.float32)
    w[0, :6] = 7.5, -7.5, 0.5, 1.5, -2.5, 3.49  # scale 1; 7.5 is clamped, halves go to even
    q = quantize(w, -1)
    assert q.codes[0, :7].tolist() == [7, -8, 0, 2, -2, 3, 0]
    assert q.scale.tolist() == [[1], [0]]
    assert q.codes[1].tolist() == [0] * 32


def test_scale_dtype_by_default():
    w = random_floats((4, 64))
    assert quantize(w, 32).scale.dtype == jnp.bfloat16
    assert quantize(w, -1).scale.dtype == jnp.float32
    assert quantize(w).group_size == 128
    assert quantize(w).scale.dtype == jnp.bfloat16


def test_codes_are_those_of_the_rounded_scales():
    w = random_floats((16, 256), seed=1)
    q = quantize(w, 32)
    exact = w.reshape(16, 8, 32) / np.asarray(q.scale, np.float32)[..., None]
    np.testing.assert_array_equal(q.codes, np.clip(np.rint(exact), -8, 7).reshape(16, 256))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32])
def test_input_dtypes(dtype):
    w = random_floats((4, 64), dtype)
    q, wide = quantize(w, 32), quantize(w.astype(np.float32), 32)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), q, wide))


@pytest.mark.parametrize("lead", [(), (2, 3), (0,)])
def test_leading_axes(lead):
    w = random_floats((*lead, 5, 70))
    q = quantize(w, 32)
    assert (q.codes.shape, q.scale.shape, q.shape) == (w.shape, (*lead, 5, 3), w.shape)
    flat = w.reshape(-1, 70)
    np.testing.assert_array_equal(q.codes.reshape(-1, 70), quantize(flat, 32).codes)
    assert dequantize(q).shape == w.shape


def test_numbers_of_zero_give_zero():
    q = quantize(np.zeros((4, 96), np.float32), 32)
    assert not q.codes.any()
    assert not q.scale.any()
    assert not dequantize(q).any()


@pytest.mark.parametrize("w", [random_floats((4, 100)), jnp.asarray(random_floats((4, 100)))], ids=type)
def test_jit_changes_nothing(w):
    inside, outside = quantize(w, 32), w4a8.quantize(w, 32)
    assert inside.group_size == outside.group_size == 32
    reference.assert_same_bits(inside.codes, outside.codes)
    reference.assert_same_bits(inside.scale, outside.scale)
    reference.assert_same_bits(dequantize(inside), outside.dequantize())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.data(),
    st.sampled_from([(2, 40, 32), (1, 96, 64), (4, 17, -1)]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_error_is_half_a_step(data, shape, scale_dtype):
    """|w - code * scale| <= scale / 2, but where the code is clamped."""
    n, k, group_size = shape
    finite = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
    values = st.one_of(st.just(0.0), finite, st.floats(-2, 2, width=16))
    w = np.array(data.draw(st.lists(values, min_size=n * k, max_size=n * k)), np.float32)
    w = np.where(np.abs(w) < 2.0**-100, 0, w).reshape(n, k).astype(np.float32)
    q = quantize(w, group_size, scale_dtype=scale_dtype)
    codes = np.asarray(q.codes, np.float64)
    width = k if group_size == -1 else group_size
    scale = np.repeat(np.asarray(q.scale, np.float64), width, axis=1)[:, :k]
    error = w - codes * scale
    inside = np.abs(error) <= scale * (0.5 + 1e-6)
    clamped = ((codes == 7) & (error > 0)) | ((codes == -8) & (error < 0))
    assert (inside | clamped).all()
    assert (np.abs(error) <= scale * 0.54).all()  # 7.5 and a bfloat16 scale's rounding
    np.testing.assert_array_equal(dequantize(q), np.asarray(q.codes) * scale.astype(np.float32))


# ---------------------------------------------------------------------------------------------------------
# Group sizes.


@pytest.mark.parametrize("spelling", [-1, None, 96])
def test_spellings_of_channel_wise(spelling):  # [A5]
    w = random_floats((4, 96))
    q, expected = quantize(w, spelling), quantize(w, -1)
    assert q.group_size == -1
    assert jax.tree.structure(q) == jax.tree.structure(expected)
    np.testing.assert_array_equal(q.codes, expected.codes)
    tensor = QuantizedTensor(expected.codes, expected.scale, spelling)
    np.testing.assert_array_equal(dequantize(tensor), dequantize(expected))
    packed = w4a8.pack_linear(tensor)
    assert packed.group_size == -1
    np.testing.assert_array_equal(packed.codes, w4a8.pack_linear(expected).codes)


@pytest.mark.parametrize("group_size", [0, 1, 7, -2, 16, 33, 95])
def test_unusable_group_sizes(group_size):  # [A5]
    message = rf"group_size must be -1, None or 96 .* multiple of 32, got {group_size}$"
    with pytest.raises(ValueError, match=message):
        w4a8.quantize(random_floats((4, 96)), group_size)
    tensor = QuantizedTensor(np.zeros((4, 96), np.int8), np.ones((4, 3), np.float32), group_size)
    for use in (w4a8.dequantize, w4a8.pack_linear, QuantizedTensor.check):
        with pytest.raises(ValueError, match=message):
            use(tensor)


@pytest.mark.parametrize(("k", "group_size"), [(80, 32), (33, 32), (40, 64), (704, 96)])
def test_short_last_group(k, group_size):
    w = random_floats((3, k))
    q = quantize(w, group_size)
    groups = math.ceil(k / group_size)
    assert q.scale.shape == (3, groups)
    last = w[:, (groups - 1) * group_size :]
    np.testing.assert_array_equal(q.scale[:, -1:], quantize(last, -1, scale_dtype=jnp.bfloat16).scale)
    np.testing.assert_allclose(dequantize(q), w, atol=np.abs(w).max() / 14)
    np.testing.assert_array_equal(dequantize(q), reference.dequantized(q))


@pytest.mark.parametrize(
    ("k", "groups", "group_size"),
    [(128, 4, 32), (128, 2, 64), (128, 1, -1), (31, 1, -1), (80, 3, 32), (96, 2, 64), (256, 3, 96)],
)
def test_group_size_is_inferred(k, groups, group_size):
    tensor = QuantizedTensor(np.zeros((2, k), np.int8), np.ones((2, groups), np.float32))
    assert tensor.group_size == group_size
    tensor.check()


@pytest.mark.parametrize(
    ("k", "groups", "why"),
    [(2048, 5, "several group sizes fit"), (128, 5, "no multiple of 32 fits"), (96, 0, "")],
)
def test_group_size_that_cannot_be_inferred(k, groups, why):
    with pytest.raises(ValueError, match=f"scale has {groups} groups for {k} inputs: .*{why}"):
        QuantizedTensor(np.zeros((2, k), np.int8), np.ones((2, groups), np.float32))


def test_group_shapes():
    for group_size, shape in ((-1, (-1, 1)), (32, (1, 32))):
        assert GroupShape.from_group_size(group_size) == shape
        assert GroupShape(*shape).group_size == group_size
    with pytest.raises(ValueError, match=r"group_shape must be .*got \(1, -1\)"):
        GroupShape(1, -1).group_size  # noqa: B018
    with pytest.raises(ValueError, match=r"group_shape must be .*got \(2, 32\)"):
        GroupShape(2, 32).group_size  # noqa: B018


def test_keys_name_schemes():
    q = quantize(random_floats((4, 96)), 32)
    assert q.key() == QuantKey(jnp.dtype(jnp.int4), jnp.dtype(jnp.bfloat16), GroupShape(1, 32))
    assert str(q.key()) == "int4 groups of 32, bfloat16 scales, symmetric"
    assert str(quantize(random_floats((4, 96)), -1).key()) == "int4 channel-wise, float32 scales, symmetric"
    assert str(QuantKey(jnp.int8, jnp.float32, GroupShape(1, -1), False)) == (
        "int8 per token, float32 scales, asymmetric"
    )
    assert len({q.key(), quantize(random_floats((4, 96)), 64).key(), q.key()}) == 2


# ---------------------------------------------------------------------------------------------------------
# Tensors as they come.


def every_code(shape=(4, 32)):
    return np.resize(np.arange(-8, 8), shape).astype(np.int8)


def test_int4_codes():  # [D18]
    codes, scale = every_code(), np.full((4, 1), 0.5, np.float32)
    narrow = QuantizedTensor(jnp.asarray(codes).astype(jnp.int4), scale)
    assert narrow.codes.dtype == jnp.int4
    np.testing.assert_array_equal(dequantize(narrow), codes * np.float32(0.5))
    host = QuantizedTensor(codes.astype(jnp.int4), scale)
    np.testing.assert_array_equal(dequantize(host), codes * np.float32(0.5))


def test_negative_scales():  # [A29]
    scale = np.array([[1.5], [-1.5], [-0.25], [0]], np.float32)
    tensor = QuantizedTensor(every_code(), scale)
    np.testing.assert_array_equal(dequantize(tensor), every_code() * scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_scale_dtypes(dtype):
    scale = np.array([[0.5], [-0.75], [3], [2.0**-14]]).astype(dtype)
    values = dequantize(QuantizedTensor(every_code(), scale))
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, every_code() * scale.astype(np.float32))


def test_tensors_are_pytrees():
    q = quantize(random_floats((2, 3, 96)), 32)
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(2, 3, 96), (2, 3, 3)]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, q)
    assert (doubled.group_size, doubled.shape) == (32, (2, 3, 96))
    one = jax.tree.map(lambda leaf: leaf[1], q)
    np.testing.assert_array_equal(dequantize(one), dequantize(q)[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.group_size = 64


# ---------------------------------------------------------------------------------------------------------
# Bad input.


@pytest.mark.parametrize(
    ("w", "arguments", "error", "message"),
    [
        (np.ones((4, 64), np.int32), {}, TypeError, "w must be a floating point array, got int32"),
        (np.ones((4, 64), bool), {}, TypeError, "w must be a floating point array, got bool"),
        (np.ones(64, np.float32), {}, ValueError, r"w must be \[..., N, K\], got shape \(64,\)"),
        (np.float32(1), {}, ValueError, r"w must be \[..., N, K\], got shape \(\)"),
        (np.array([[1, NAN]], np.float32), {"group_size": -1}, ValueError, "w holds NaN or infinity"),
        (np.array([[1, -np.inf]], np.float32), {"group_size": -1}, ValueError, "w holds NaN or infinity"),
        (
            np.ones((4, 64), np.float32),
            {"scale_dtype": np.float16},
            TypeError,
            "scale_dtype must be float32 or bfloat16, got float16",
        ),
        (
            np.ones((4, 64), np.float32),
            {"scale_dtype": np.int8},
            TypeError,
            "scale_dtype must be .* got int8",
        ),
        (np.ones((4, 64), np.float32), {"group_size": 32.5}, (TypeError, ValueError), "group_size .* 32.5"),
    ],
)
def test_quantize_refuses(w, arguments, error, message):
    with pytest.raises(error, match=message):
        w4a8.quantize(w, **{"group_size": 32, **arguments})


def spoilt_codes(value):
    codes = every_code()
    codes[2, 5] = value
    return codes


SCALE = np.ones((4, 1), np.float32)
BAD_TENSORS = {
    "dtype of codes": (
        every_code().astype(np.int32),
        SCALE,
        -1,
        TypeError,
        "codes must be int8 or int4, got int32",
    ),
    "float codes": (
        every_code().astype(np.float32),
        SCALE,
        -1,
        TypeError,
        "codes must be int8 .* got float32",
    ),
    "dtype of scale": (
        every_code(),
        SCALE.astype(np.int32),
        -1,
        TypeError,
        "scale must be float32, .* got int32",
    ),
    "double scale": (
        every_code(),
        SCALE.astype(float),
        -1,
        TypeError,
        "scale must be float32, .* got float64",
    ),
    "code 8": (spoilt_codes(8), SCALE, -1, ValueError, r"codes must lie in \[-8, 7\], found the value 8"),
    "code 9": (spoilt_codes(9), SCALE, -1, ValueError, r"codes must lie in \[-8, 7\], found the value 9"),
    "code -9": (spoilt_codes(-9), SCALE, -1, ValueError, r"codes must lie in \[-8, 7\], found the value -9"),
    "code -128": (spoilt_codes(-128), SCALE, -1, ValueError, r"codes .*, found the value -128"),
    "rank": (
        every_code(32),
        np.ones(1, np.float32),
        -1,
        ValueError,
        r"codes must be \[..., N, K\], got .*\(32,\)",
    ),
    "rows of scale": (
        every_code(),
        np.ones((3, 1), np.float32),
        -1,
        ValueError,
        r"scale must have shape \(4, 1\) .*got \(3, 1\)",
    ),
    "rank of scale": (
        every_code(),
        np.ones((1, 4, 1), np.float32),
        -1,
        ValueError,
        r"scale must have shape \(4, 1\) .*got \(1, 4, 1\)",
    ),
    "number of groups": (
        every_code((4, 80)),
        np.ones((4, 2), np.float32),  # neither 80 / 32 = 2.5 up nor anything that 32 divides
        32,
        ValueError,
        r"scale must have shape \(4, 3\) .*group_size 32, got \(4, 2\)",
    ),
    "NaN scale": (every_code(), SCALE * NAN, -1, ValueError, "scale holds NaN or infinity"),
    "infinite scale": (every_code(), SCALE * -np.inf, -1, ValueError, "scale holds NaN or infinity"),
    "NaN scale in bfloat16": (
        every_code(),
        np.array([[1], [1], [NAN], [1]], jnp.bfloat16),
        -1,
        ValueError,
        "scale holds NaN or infinity",
    ),
}


@pytest.mark.parametrize(
    ("kind", "on_device"),
    [
        (kind, on_device)
        for kind in BAD_TENSORS
        for on_device in (False, True)
        if "double" not in kind or not on_device
    ],
)
def test_tensors_are_checked(kind, on_device):
    codes, scale, group_size, error, message = BAD_TENSORS[kind]
    if on_device:
        codes, scale = jnp.asarray(codes), jnp.asarray(scale)
    tensor = QuantizedTensor(codes, scale, group_size)
    with pytest.raises(error, match=f"^weights.{message}"):
        tensor.dequantize()
    with pytest.raises(error, match=f"^weights.{message}"):
        w4a8.pack_linear(tensor)
    with pytest.raises(error, match=f"^name.{message}"):
        tensor.check("name")


@pytest.mark.parametrize(
    ("codes", "scale"),
    [(every_code(), np.float32(1)), (np.int8(1), SCALE)],
    ids=["scale", "codes"],
)
def test_tensors_without_axes(codes, scale):
    with pytest.raises((TypeError, ValueError), match=r"(codes|scale) must .*\(\)"):
        QuantizedTensor(codes, scale).check()


def test_weights_that_a_jitted_function_closes_over_are_checked_and_used():
    q = quantize(jnp.ones((8, 64)), 32)
    np.testing.assert_array_equal(jax.jit(lambda: q.dequantize())(), q.dequantize())
    bad = QuantizedTensor(jnp.full((8, 64), 9, jnp.int8), q.scale, 32)
    with pytest.raises(ValueError, match="found the value 9"):
        jax.jit(lambda: bad.dequantize())()
