"""Native packing has the bits of the numpy path, whatever the source, the sizes and the threads."""

import contextlib
import mmap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import QuantizedTensor, QuantizedWords, packing, threads
from jax_w4a8.buffers import aligned_empty
from jax_w4a8.quantization import unpack_words
from jax_w4a8.weights import ExpertParts, fill_expert

from .checkpoints import pack_words
from .reference import assert_same_bits, random_layer, random_weights

pytestmark = pytest.mark.skipif(packing._native is None, reason="needs the native extension")

BFLOAT16 = ml_dtypes.bfloat16
#: Whole blocks; blocks, runs and groups cut short; fewer inputs than a run; spans of 2048 cut short.
SIZES = [(32, 64), (1, 1), (7, 31), (17, 100), (34, 80), (70, 33), (3, 4200), (16, 1056)]


@contextlib.contextmanager
def numpy_path():
    native = packing._native
    packing._native = None
    try:
        yield
    finally:
        packing._native = native


def assert_same_leaves(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, b)


def words_of(weights):
    """The same weights in words whose unused bits are set."""
    *lead, n, k = weights.codes.shape
    words = pack_words(weights.codes.reshape(-1, k))
    if k % 8:
        words.view(np.uint32)[:, -1] |= np.uint32((0xFFFFFFFF << 4 * (k % 8)) & 0xFFFFFFFF)
    return QuantizedWords(words.reshape(*lead, n, words.shape[1]), weights.scale, k, weights.group_size)


def random_floats(shape, dtype, seed=0):
    """Of many magnitudes, with a channel of zeros, and one whose codes all lie between two."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    w[..., 0, :] = 0
    w[..., -1, :] = rng.integers(-15, 16, shape[-1]) / 2
    w[..., -1, 0] = 7.5
    return w.astype(dtype)


# ---------------------------------------------------------------------------------------------------------
# The same bits.


@pytest.mark.parametrize("scale_dtype", [np.float32, BFLOAT16, np.float16])
@pytest.mark.parametrize("group_size", [32, 64, 1024, -1])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_linear(n, k, group_size, scale_dtype):
    weights = random_weights(np.random.default_rng(n), (n, k), group_size, scale_dtype)
    bias = np.random.default_rng(1).normal(size=n)
    with numpy_path():
        expected = w4a8.pack_linear(weights, bias), w4a8.pack_linear(weights)
    for given in (weights, words_of(weights)):
        packed = w4a8.pack_linear(given, bias)
        assert_same_leaves((packed, w4a8.pack_linear(given)), expected)
        assert all(leaf.ctypes.data % 64 == 0 for leaf in jax.tree.leaves(packed))


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 100), (32, 64), (3, 4200)])
def test_linear_from_floats(n, k, group_size):
    for dtype in (np.float32, BFLOAT16, np.float16, np.float64):
        w = random_floats((n, k), dtype)
        for scale_dtype in (np.float32, BFLOAT16):
            packed = w4a8.quantize_and_pack_linear(w, None, group_size, scale_dtype=scale_dtype)
            with numpy_path():
                expected = w4a8.quantize_and_pack_linear(w, None, group_size, scale_dtype=scale_dtype)
            assert_same_leaves(packed, expected)


@pytest.mark.parametrize("instruction_set", w4a8.instruction_sets())
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16])
def test_floats_at_the_edges(dtype, instruction_set):
    """Subnormal weights and scales, the largest finite ones, and every pattern of a short float."""
    tiny, most = ml_dtypes.finfo(dtype).smallest_subnormal, ml_dtypes.finfo(dtype).max
    rows = [np.arange(-16, 16) * float(tiny), np.linspace(-1, 1, 32) * float(most)]
    rows += [np.arange(-16, 16) * 2.0**e for e in (-130, -128, -127, -126, -125, -124, -120, -24, -14)]
    w = np.stack(rows).astype(dtype)
    if dtype != np.float32:
        patterns = np.arange(1 << 16).astype(np.uint16).view(dtype).reshape(-1, 32)
        w = np.concatenate([w, patterns[np.isfinite(patterns.astype(np.float32)).all(axis=1)]])
    with w4a8.using_instruction_set(instruction_set):
        packed = w4a8.quantize_and_pack_linear(w, group_size=32, scale_dtype=np.float32)
    with numpy_path():
        assert_same_leaves(packed, w4a8.quantize_and_pack_linear(w, group_size=32, scale_dtype=np.float32))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    ("hidden", "inner", "group_size"), [(64, 96, 32), (100, 34, 32), (10, 6, -1), (33, 7, 64)]
)
def test_experts(hidden, inner, group_size, biased, interleaved):
    layer = random_layer(4, 3, hidden, inner, group_size, BFLOAT16, biased=biased)
    with numpy_path():
        expected = w4a8.pack_experts(*layer, interleaved=interleaved)
    assert_same_leaves(w4a8.pack_experts(*layer, interleaved=interleaved), expected)
    words = words_of(layer.w13), words_of(layer.w2), *layer[2:]
    assert_same_leaves(w4a8.pack_experts(*words, interleaved=interleaved), expected)
    with numpy_path():
        assert_same_leaves(w4a8.pack_experts(*words, interleaved=interleaved), expected)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_experts_from_floats(dtype):
    w13, w2 = random_floats((3, 68, 100), dtype), random_floats((3, 100, 34), dtype, 1)
    biases = random_floats((3, 68), np.float32, 2), random_floats((3, 100), np.float32, 3)
    packed = w4a8.quantize_and_pack_experts(w13, w2, *biases, interleaved=True, group_size=32)
    quantized = [jax.tree.map(np.asarray, w4a8.quantize(w, 32)) for w in (w13, w2)]
    assert_same_leaves(packed, w4a8.pack_experts(*quantized, *biases, interleaved=True))
    with numpy_path():
        again = w4a8.quantize_and_pack_experts(w13, w2, *biases, interleaved=True, group_size=32)
    assert_same_leaves(packed, again)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (0,)])
def test_stacks(lead):
    weights = random_weights(np.random.default_rng(3), (*lead, 10, 80), 32)
    with numpy_path():
        expected = w4a8.pack_linear(weights)
    assert_same_leaves(w4a8.pack_linear(weights), expected)
    assert_same_leaves(w4a8.pack_linear(words_of(weights)), expected)


def test_one_expert_in_its_place():
    layer = random_layer(5, 3, 100, 34, 32, BFLOAT16, biased=True)
    whole = w4a8.pack_experts(*layer)
    parts = [
        ExpertParts(*(jax.tree.map(lambda leaf: leaf[expert, rows], part) for part, rows in (  # noqa: B023
            (layer.w13, slice(0, 34)), (layer.w13, slice(34, None)), (layer.w2, slice(None)),
            (layer.w13_bias, slice(0, 34)), (layer.w13_bias, slice(34, None)), (layer.w2_bias, slice(None)))))
        for expert in range(3)
    ]  # fmt: skip
    for path in (contextlib.nullcontext, numpy_path):
        filled = parts[0].empty(3)
        for expert in (2, 0, 1):
            with path():
                fill_expert(filled, expert, parts[expert])
        assert_same_leaves(filled, whole)


def test_unpacked_words():
    weights = random_weights(np.random.default_rng(3), (2, 10, 77), 32)
    words = words_of(weights)
    assert words.shape == weights.shape
    assert_same_bits(words.unpack().codes, weights.codes)
    assert_same_bits(unpack_words(jnp.asarray(words.words), 77), weights.codes)
    assert_same_bits(unpack_words(words.words[:, ::2], 77), weights.codes[:, ::2])


# ---------------------------------------------------------------------------------------------------------
# Arrays as they come.


def test_jax_arrays_are_packed_natively(monkeypatch):
    layer = random_layer(7, hidden=40, inner=34, scale_dtype=BFLOAT16, biased=True)
    on_device = jax.tree.map(jnp.asarray, tuple(layer))
    monkeypatch.setattr(w4a8.weights, "_pack_experts_in_python", None)
    packed = w4a8.pack_experts(*on_device)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(packed))
    assert_same_leaves(packed, w4a8.pack_experts(*layer))
    narrow = QuantizedTensor(on_device[0].codes.astype(jnp.int4), on_device[0].scale, 32)
    assert_same_leaves(w4a8.pack_experts(narrow, *on_device[1:]), packed)


def test_words_and_floats_inside_jit():
    weights = random_weights(np.random.default_rng(3), (10, 80), 32)
    packed = jax.jit(w4a8.pack_linear)(jax.tree.map(jnp.asarray, words_of(weights)))
    assert_same_bits(packed.codes, w4a8.pack_linear(weights).codes)
    w = random_floats((10, 80), np.float32)
    packed = jax.jit(lambda w: w4a8.quantize_and_pack_linear(w, group_size=32))(w)
    assert_same_bits(packed.codes, w4a8.quantize_and_pack_linear(w, group_size=32).codes)


def odd_address(array):
    copy = np.frombuffer(bytearray(array.nbytes + 1), array.dtype, offset=1).reshape(array.shape)
    copy[...] = array
    return copy


def read_only_map(array):
    pages = mmap.mmap(-1, array.nbytes + 8)
    copy = np.frombuffer(pages, array.dtype, offset=8, count=array.size).reshape(array.shape)
    copy[...] = array
    copy.flags.writeable = False
    return copy


def every_other(array):
    return np.repeat(array, 2, axis=-1)[..., ::2]


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1]


@pytest.mark.parametrize("view", [odd_address, read_only_map, every_other, backwards, np.asfortranarray])
def test_views(view):
    weights = random_weights(np.random.default_rng(3), (20, 77), 32, BFLOAT16)
    expected = w4a8.pack_linear(weights)
    assert_same_leaves(w4a8.pack_linear(jax.tree.map(view, weights)), expected)
    assert_same_leaves(w4a8.pack_linear(jax.tree.map(view, words_of(weights))), expected)
    w = random_floats((20, 77), np.float32)
    assert_same_leaves(w4a8.quantize_and_pack_linear(view(w)), w4a8.quantize_and_pack_linear(w))


# ---------------------------------------------------------------------------------------------------------
# Threads and memory.


def test_large_matrices_are_shared_out(monkeypatch):
    """Many calls for one matrix, from several threads; the same bits on one."""
    weights = random_weights(np.random.default_rng(3), (1000, 512), 32, BFLOAT16)
    monkeypatch.setattr(packing, "_CALL_BYTES", 1 << 14)
    job_count = len(list(packing.Job(weights, None, blocks_like(weights), 512).calls()))
    assert job_count > 10
    monkeypatch.setattr(threads, "num_threads", lambda: 4)
    several = w4a8.pack_linear(weights)
    with w4a8.thread_limit(1):
        assert threads.usable_threads() == 1
        one = w4a8.pack_linear(weights)
    assert_same_leaves(several, one)


def blocks_like(weights):
    packed = w4a8.pack_linear(weights)
    return packing.Blocks(packed.codes, packed.scale, packed.scaled_sum, packed.bias)


def test_workers_raise_what_a_call_raised():
    def fail():
        raise ValueError("this one")

    done = []
    with threads.Workers() as workers, pytest.raises(ValueError, match="this one"):
        workers.run([lambda: done.append(1), fail, lambda: done.append(2)])
    assert sorted(done) in ([1], [1, 2])
    with threads.Workers() as workers:
        assert workers.run([lambda i=i: i for i in range(5)]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("nbytes", [0, 1, 4 << 20, (9 << 20) + 100])
def test_buffers_are_aligned_and_writable(nbytes):
    array = aligned_empty((nbytes,), np.uint8)
    assert array.nbytes == nbytes
    huge = nbytes >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE")
    assert not nbytes or array.ctypes.data % (2 << 20 if huge else 64) == 0
    array[...] = 7
    assert (array == 7).all()
    taken = jax.device_put(array)
    if taken.device.platform == "cpu" and nbytes:
        assert taken.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("huge_pages", [True, False])
def test_too_large_an_array_is_a_memory_error_with_its_size(huge_pages, monkeypatch):
    if not huge_pages:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    with pytest.raises(MemoryError, match=r"4,294,967,296 MiB, .*shape \(1125899906842624,\).* float32"):
        aligned_empty((1 << 50,), np.float32)


def test_a_system_without_huge_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    array = aligned_empty((5 << 20,), np.uint8)
    array[...] = 1
    assert array.sum() == 5 << 20


# ---------------------------------------------------------------------------------------------------------
# Bad input, found in the same pass.


@pytest.mark.parametrize("bad", [-128, -9, 8, 127])
@pytest.mark.parametrize("position", [(0, 0), (19, 76), (7, 8), (16, 74)])
def test_codes_out_of_range(position, bad):
    weights = random_weights(np.random.default_rng(3), (20, 77), 32)
    weights.codes[position] = bad
    with pytest.raises(ValueError, match=rf"weights\.codes must lie in \[-8, 7\], found the value {bad}"):
        w4a8.pack_linear(weights)
    layer = random_layer(5, 2, 77, 20)
    layer.w2.codes[1, position[1], position[0]] = bad
    with pytest.raises(ValueError, match=rf"w2\.codes must lie in \[-8, 7\], found the value {bad}"):
        w4a8.pack_experts(*layer)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.float16])
def test_what_is_not_finite(dtype, bad):
    weights = random_weights(np.random.default_rng(3), (20, 77), 32, dtype)
    weights.scale[17, 2] = bad
    for given in (weights, words_of(weights)):
        with pytest.raises(ValueError, match=r"weights\.scale holds NaN or infinity"):
            w4a8.pack_linear(given)
    w = random_floats((20, 77), dtype)
    w[18, 76] = bad
    with pytest.raises(ValueError, match="w holds NaN or infinity"):
        w4a8.quantize_and_pack_linear(w)
    with pytest.raises(ValueError, match="w2 holds NaN or infinity"):
        w4a8.quantize_and_pack_experts(random_floats((1, 154, 20), dtype), w[None])


def test_words_that_do_not_fit():
    words = np.zeros((4, 8), np.int32)
    scale = np.ones((4, 2), np.float32)
    for given, message in [
        (QuantizedWords(words.astype(np.int64), scale, 64, 32), r"w13\.words must be int32, got int64"),
        (QuantizedWords(words[0], scale, 64, 32), r"w13\.words must be \[\.\.\., N, ceil\(K / 8\)\]"),
        (QuantizedWords(words, scale, 65, 32), r"w13\.words must have 9 words a row for 65 inputs"),
        (QuantizedWords(words, scale, 0, 32), r"w13\.in_features must be at least 1, got 0"),
        (QuantizedWords(words, scale[:, :1], 64, 32), r"w13\.scale must have shape \(4, 2\)"),
        (QuantizedWords(words, scale.astype(np.int32), 64, 32), r"w13\.scale must be float32"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            w4a8.pack_experts(given, QuantizedWords(words, scale, 64, 32))


def test_floats_that_do_not_fit():
    with pytest.raises(TypeError, match="w must be a floating point array, got int32"):
        w4a8.quantize_and_pack_linear(np.ones((4, 32), np.int32))
    with pytest.raises(TypeError, match="w2 must be a floating point array, got int8"):
        w4a8.quantize_and_pack_experts(np.ones((1, 8, 32), np.float32), np.ones((1, 32, 4), np.int8))
    with pytest.raises(ValueError, match=r"w13 must have shape \(1, 8, 32\)"):
        w4a8.quantize_and_pack_experts(np.ones((1, 9, 32), np.float32), np.ones((1, 32, 4), np.float32))
    with pytest.raises(ValueError, match="group_size must be"):
        w4a8.quantize_and_pack_linear(np.ones((4, 64), np.float32), group_size=48)


def test_the_extension_checks_its_arrays():
    """Wrong sizes are errors there too, never a wild write."""
    weights = random_weights(np.random.default_rng(3), (20, 64), 32)
    blocks = blocks_like(weights)
    sums = blocks.scaled_sum
    arguments = (weights.codes, weights.scale, "float32", 64, blocks.codes, blocks.scale, "float32", sums)
    assert packing._native.pack_codes(*arguments)
    for place, wrong in [
        (0, weights.codes[:, :63]),
        (0, weights.codes[:16]),
        (1, weights.scale[:, :1]),
        (2, "bfloat16"),
        (3, 32),
        (3, 65),
        (4, blocks.codes[:1]),
        (4, blocks.codes[..., :100]),
        (4, blocks.codes[..., ::2]),
        (5, blocks.scale[..., :8]),
        (6, "float16"),
        (7, sums[:, :15]),
    ]:
        with pytest.raises(ValueError, match="must"):
            packing._native.pack_codes(*arguments[:place], wrong, *arguments[place + 1 :])
