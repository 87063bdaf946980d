"""The packed layout: every byte where the documentation says, and back again."""

from __future__ import annotations

import dataclasses
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import QuantizedTensor
from jax_w4a8.weights import BLOCK_CHANNELS, BLOCK_INPUTS, num_blocks

from .reference import Layer, assert_same_bits, on_device, random_layer, random_weights

SIZES = [(16, 32), (32, 64), (1, 1), (7, 31), (10, 100), (34, 80), (70, 33), (17, 160)]


def weights_of(n, k, group_size, scale_dtype=np.float32, seed=0):
    return random_weights(np.random.default_rng(seed), (n, k), group_size, scale_dtype)


def padded_width(k, group_size):
    """Inputs of a row of packed groups."""
    width = -(-k // 32) * 32 if group_size == -1 else group_size
    return -(-k // width) * width


def assert_same_tensor(actual, expected):
    k = expected.shape[-1]
    assert actual.group_size == (-1 if expected.group_size == k else expected.group_size)
    assert_same_bits(actual.codes, np.asarray(expected.codes).astype(np.int8))
    assert_same_bits(actual.scale, expected.scale)


def assert_same_leaves(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, b)


def assert_same_but_for_rounding(actual, expected):
    """Inside jit, XLA may add scale x sum of codes up with one rounding less: scaled_sum's last bit."""
    assert_same_leaves(without_sums(actual), without_sums(expected))
    for side in ("w13", "w2"):
        a, b = getattr(actual, side).scaled_sum, getattr(expected, side).scaled_sum
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7 * np.abs(b).max())


def without_sums(packed):
    return [dataclasses.replace(part, scaled_sum=None) for part in (packed.w13, packed.w2)]


# ---------------------------------------------------------------------------------------------------------
# Bytes.


@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_bytes_are_where_the_documentation_says(n, k, group_size):
    weights = weights_of(n, k, group_size)
    packed = w4a8.pack_linear(weights)
    width = padded_width(k, group_size)
    blocks, groups = num_blocks(n), weights.scale.shape[1]
    assert packed.codes.shape == (blocks, groups, 8 * width // groups)
    assert packed.codes.dtype == np.uint8
    codes = np.zeros((blocks * 16, width), np.int64)
    codes[:n, :k] = weights.codes
    for block, run in np.ndindex(blocks, width // BLOCK_INPUTS):
        begin = 64 * run
        in_bytes = packed.codes.reshape(blocks, -1)[block, begin : begin + 64]
        for c, i in np.ndindex(BLOCK_CHANNELS, 4):
            channel, first = 16 * block + c, 8 * run
            assert in_bytes[4 * c + i] & 15 == codes[channel, first + i] + 8
            assert in_bytes[4 * c + i] >> 4 == codes[channel, first + 4 + i] + 8


@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_scales_sums_and_biases_are_where_the_documentation_says(n, k, group_size):
    weights = weights_of(n, k, group_size)
    bias = np.random.default_rng(1).normal(size=n).astype(np.float32)
    packed = w4a8.pack_linear(weights, bias)
    blocks, groups = num_blocks(n), weights.scale.shape[1]
    assert packed.scale.shape == (blocks, groups, 16)
    assert packed.scaled_sum.shape == packed.bias.shape == (blocks, 16)
    width = k if group_size == -1 else group_size
    for block, c in np.ndindex(blocks, 16):
        channel = 16 * block + c
        if channel >= n:
            assert not packed.scale[block, :, c].any()
            assert packed.scaled_sum[block, c] == packed.bias[block, c] == 0
            continue
        assert packed.bias[block, c] == bias[channel]
        total = 0.0
        for group in range(groups):
            scale = weights.scale[channel, group]
            assert packed.scale[block, group, c] == scale
            codes = weights.codes[channel, group * width : (group + 1) * width]
            total += float(scale) * int(codes.astype(np.int64).sum())
        room = 1e-7 * 8 * width * float(np.abs(weights.scale[channel]).sum())
        assert abs(packed.scaled_sum[block, c] - total) <= room


def test_w13_alternates_gate_and_up():
    layer = random_layer(2, experts=2, hidden=40, inner=20, biased=True)
    packed = w4a8.pack_experts(*layer)
    assert packed.w13.codes.shape == (2, 4, 2, 256)  # two blocks of 16 on each side
    assert (packed.w13.out_features, packed.w13.in_features) == (64, 40)
    for block, side in ((0, "gate"), (1, "up"), (2, "gate"), (3, "up")):
        begin = 16 * (block // 2) + (20 if side == "up" else 0)
        rows = slice(begin, begin + (16 if block < 2 else 4))
        part = QuantizedTensor(layer.w13.codes[:, rows], layer.w13.scale[:, rows], 32)
        alone = w4a8.pack_linear(part, layer.w13_bias[:, rows])
        for field in ("codes", "scale", "scaled_sum", "bias"):
            whole = getattr(packed.w13, field)[:, block : block + 1]
            assert_same_bits(whole, getattr(alone, field))


# ---------------------------------------------------------------------------------------------------------
# And back.


@pytest.mark.parametrize("scale_dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear_round_trip(n, k, group_size, scale_dtype):  # [A7]
    weights = weights_of(n, k, group_size, scale_dtype)
    bias = np.random.default_rng(1).normal(size=n).astype(np.float32)
    unpacked, unpacked_bias = w4a8.unpack_linear(w4a8.pack_linear(weights, bias))
    assert isinstance(unpacked.codes, np.ndarray)
    assert_same_tensor(unpacked, weights)
    assert_same_bits(unpacked_bias, bias)
    assert not w4a8.unpack_linear(w4a8.pack_linear(weights))[1].any()


def test_all_codes_survive():  # [A30]
    codes = np.stack([np.resize(np.roll(np.arange(-8, 8), shift), 96) for shift in range(16)])
    weights = QuantizedTensor(codes.astype(np.int8), np.ones((16, 3), np.float32))
    assert (np.unique(codes[:, :32]) == np.arange(-8, 8)).all()
    assert_same_tensor(w4a8.unpack_linear(w4a8.pack_linear(weights))[0], weights)


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_stacks_of_linear_weights(lead):
    weights = random_weights(np.random.default_rng(3), (*lead, 10, 80), 32)
    packed = w4a8.pack_linear(weights)
    assert_same_tensor(w4a8.unpack_linear(packed)[0], weights)
    last = jax.tree.map(lambda leaf: leaf[(-1,) * len(lead)], packed)
    part = jax.tree.map(lambda leaf: leaf[(-1,) * len(lead)], weights)
    assert_same_leaves(last, w4a8.pack_linear(part))


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("hidden", "inner", "group_size"), [(64, 96, 32), (100, 34, 32), (10, 6, -1)])
def test_experts_round_trip(hidden, inner, group_size, biased):
    layer = random_layer(4, 3, hidden, inner, group_size, biased=biased)
    w13, w2, w13_bias, w2_bias = w4a8.unpack_experts(w4a8.pack_experts(*layer))
    assert_same_tensor(w13, layer.w13)
    assert_same_tensor(w2, layer.w2)
    if biased:
        assert_same_bits(w13_bias, layer.w13_bias)
        assert_same_bits(w2_bias, layer.w2_bias)
    else:
        assert (w13_bias.shape, w2_bias.shape) == ((3, 2 * inner), (3, hidden))
        assert not w13_bias.any()
        assert not w2_bias.any()


def interleave(array):
    """[E, 2I, ...] with gate channels first, to gate and up in turn."""
    gate, up = np.split(array, 2, axis=1)
    return np.stack([gate, up], axis=2).reshape(array.shape)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (10, 34), (33, 7)])
def test_interleaved_w13_packs_alike(hidden, inner):  # [B15]
    layer = random_layer(5, 3, hidden, inner, biased=True)
    turned = QuantizedTensor(interleave(layer.w13.codes), interleave(layer.w13.scale), 32)
    packed = w4a8.pack_experts(turned, layer.w2, interleave(layer.w13_bias), layer.w2_bias, interleaved=True)
    assert_same_leaves(packed, w4a8.pack_experts(*layer))


def test_experts_of_two_group_sizes():
    w13 = random_layer(6, 2, 128, 96, 64).w13
    w2 = random_layer(6, 2, 128, 96, -1).w2
    packed = w4a8.pack_experts(w13, w2)
    assert (packed.w13.group_size, packed.w2.group_size) == (64, -1)
    unpacked = w4a8.unpack_experts(packed)
    assert_same_tensor(unpacked[0], w13)
    assert_same_tensor(unpacked[1], w2)


def test_group_size_of_all_inputs_is_channel_wise():
    weights = weights_of(10, 96, -1)
    same = QuantizedTensor(weights.codes, weights.scale, 96)
    assert_same_leaves(w4a8.pack_linear(same), w4a8.pack_linear(weights))


# ---------------------------------------------------------------------------------------------------------
# Arrays as they come.


def kinds_of(packed):
    return {type(leaf) for leaf in jax.tree.leaves(packed)}


def test_numpy_in_numpy_out():
    layer = random_layer(7, biased=True)
    assert kinds_of(w4a8.pack_experts(*layer)) == {np.ndarray}
    assert kinds_of(w4a8.unpack_experts(w4a8.pack_experts(*layer))) == {np.ndarray}
    assert kinds_of(w4a8.pack_linear(weights_of(4, 40, 32), np.ones(4, np.float32))) == {np.ndarray}


def test_jax_in_jax_out():
    layer = random_layer(7, hidden=40, inner=34, biased=True)
    packed = w4a8.pack_experts(*on_device(layer))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(packed))
    assert_same_leaves(packed, w4a8.pack_experts(*layer))
    unpacked = w4a8.unpack_experts(packed)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(unpacked))
    assert_same_leaves(unpacked, tuple(layer))


def test_packing_inside_jit():
    layer = on_device(random_layer(7, biased=True))
    packed = jax.jit(lambda layer: w4a8.pack_experts(*layer))(layer)
    assert_same_but_for_rounding(packed, w4a8.pack_experts(*random_layer(7, biased=True)))


@pytest.mark.parametrize("device", [False, True], ids=["numpy", "jax"])
def test_int4_at_the_door(device):  # [D18]
    weights = weights_of(20, 96, 32)
    narrow = weights.codes.astype(jnp.int4)
    given = QuantizedTensor(jnp.asarray(narrow) if device else narrow, weights.scale)
    packed = w4a8.pack_linear(given)
    assert packed.codes.dtype == jnp.uint8
    assert_same_leaves(packed, w4a8.pack_linear(weights))


def unaligned(array):
    """A copy that begins at an odd address."""
    buffer = bytearray(array.nbytes + 1)
    copy = np.frombuffer(buffer, array.dtype, offset=1).reshape(array.shape)
    copy[...] = array
    return copy


def strided(array):
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 1, array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def transposed(array):
    return np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def mapped(array):
    """In a memory map, at a multiple of 8 bytes that no vector likes."""
    pages = mmap.mmap(-1, array.nbytes + 8)
    copy = np.frombuffer(pages, array.dtype, offset=8, count=array.size).reshape(array.shape)
    copy[...] = array
    return copy


def reversed_(array):
    return np.ascontiguousarray(array[..., ::-1])[..., ::-1]


@pytest.mark.parametrize("scale_dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("view", [unaligned, strided, transposed, read_only, mapped, reversed_])
def test_views_pack_alike(view, scale_dtype):  # [D6]
    layer = random_layer(8, hidden=40, inner=34, scale_dtype=scale_dtype, biased=True)
    viewed = jax.tree.map(view, layer)
    before = jax.tree.map(np.copy, layer)
    assert_same_leaves(w4a8.pack_experts(*viewed), w4a8.pack_experts(*layer))
    assert_same_leaves(viewed, before)


def test_jax_arrays_of_another_layout_pack_alike():  # [D6]
    layer = random_layer(8, hidden=40, inner=34)

    @jax.jit
    def pack(turned):
        straight = jax.tree.map(lambda x: x.swapaxes(-1, -2), turned)
        return w4a8.pack_experts(*straight)

    turned = jax.tree.map(lambda x: jnp.asarray(x.swapaxes(-1, -2)), layer)
    assert_same_but_for_rounding(pack(turned), w4a8.pack_experts(*layer))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_scales_keep_their_precision(dtype):  # [0.2]
    weights = weights_of(20, 96, 32, dtype)
    packed = w4a8.pack_linear(weights)
    kept = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    assert packed.scale.dtype == packed.key().scale_dtype == kept
    unpacked, _ = w4a8.unpack_linear(packed)
    assert_same_bits(unpacked.scale, weights.scale.astype(kept))
    wide = QuantizedTensor(weights.codes, weights.scale.astype(np.float32))
    assert_same_bits(packed.scaled_sum, w4a8.pack_linear(wide).scaled_sum)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float64])
def test_biases_become_float32(dtype):
    bias = np.arange(20).astype(dtype)
    packed = w4a8.pack_linear(weights_of(20, 96, 32), bias)
    assert_same_bits(w4a8.unpack_linear(packed)[1], np.arange(20, dtype=np.float32))


# ---------------------------------------------------------------------------------------------------------
# Pytrees.


def test_leaves_and_static_fields():
    packed = w4a8.pack_experts(*random_layer(9, 3, 100, 34, biased=True))
    assert len(jax.tree.leaves(packed)) == 8
    assert (packed.num_experts, packed.hidden_size, packed.intermediate_size) == (3, 100, 34)
    assert (packed.w2.out_features, packed.w2.in_features, packed.w2.group_size) == (100, 34, 32)
    assert (packed.w13.group_width, packed.w2.group_width) == (32, 32)
    assert packed.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
    assert packed.key() == packed.w13.key() == random_layer(9).w13.key()
    copy = jax.tree.map(np.copy, packed)
    assert jax.tree.structure(copy) == jax.tree.structure(packed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.w13 = packed.w2
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(packed)]
    assert names[:2] == [".w13.codes", ".w13.scale"]


def test_packed_weights_are_half_a_byte_each():
    packed = w4a8.pack_experts(*random_layer(10, 2, 256, 128, 128, jnp.bfloat16))
    count = 2 * 3 * 256 * 128
    assert packed.w13.codes.nbytes + packed.w2.codes.nbytes == count // 2
    assert packed.nbytes < 0.57 * count


def test_other_sizes_are_another_structure():
    structures = {
        jax.tree.structure(w4a8.pack_linear(weights_of(n, k, group_size)))
        for n, k, group_size in [(15, 96, 32), (16, 96, 32), (16, 90, 32), (16, 96, 96), (16, 96, -1)]
    }
    assert len(structures) == 4  # 96 inputs in groups of 96 are channel-wise


def test_weights_are_arguments_of_jit():
    traces = []

    @jax.jit
    def total(packed):
        traces.append(packed.group_size)
        return packed.codes.astype(jnp.int32).sum()

    for seed in (1, 2):
        packed = w4a8.pack_linear(weights_of(20, 96, 32, seed=seed))
        assert total(packed) == packed.codes.astype(np.int64).sum()
    assert traces == [32]
    total(w4a8.pack_linear(weights_of(20, 96, -1)))
    assert traces == [32, -1]


def test_experts_are_slices():
    layer = random_layer(11, experts=4, biased=True)
    packed = w4a8.pack_experts(*layer)
    some = jax.tree.map(lambda leaf: leaf[1:3], packed)
    assert some.num_experts == 2
    part = Layer(*jax.tree.map(lambda leaf: leaf[1:3], tuple(layer)))
    assert_same_leaves(some, w4a8.pack_experts(*part))
