"""Attention over spans: against the textbook's formula, its gradient, and bits that no neighbour changes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_w4a8 import ffi, invariance, native_available
from jax_w4a8.models.attend import attend, cache_slots
from jax_w4a8.models.cache import store
from jax_w4a8.models.layers import RMSNorm, matmul_float
from jax_w4a8.models.native_attend import attend_native
from jax_w4a8.models.span import Span

from .reference import assert_same_bits

HEADS, KV_HEADS, DIM, WIDTH = 6, 2, 24, 48
SCALE = 0.25
NATIVE = pytest.mark.skipif(not native_available(), reason="needs the native extension")
both = pytest.mark.parametrize("kind", ["xla", pytest.param("native", marks=NATIVE)])


def span_of(starts, lengths, tokens):
    return Span(jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32), tokens)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("kind", "window"))
def run(kind, queries, keys, values, span, sinks=None, window=None):
    """Keys and values as XLA's attention takes them; the native one has them turned."""
    if kind == "xla":
        return attend(queries, keys, values, span, scale=SCALE, window=window, sinks=sinks)
    turned = keys.swapaxes(2, 3), values.swapaxes(2, 3)
    return attend_native(queries, *turned, span, scale=SCALE, window=window, sinks=sinks)


def textbook(queries, keys, values, span, sinks=None, window=None, xp=np):
    """The whole matrix of scores at once."""
    group = HEADS // KV_HEADS
    keys, values = xp.repeat(keys, group, axis=1), xp.repeat(values, group, axis=1)
    scores = xp.einsum("btnd,bnsd->bnts", queries, keys) * SCALE
    visible = np.asarray(span.mask(jnp.arange(keys.shape[2]), window))[:, None]
    scores = xp.where(visible, scores, -np.inf)
    if sinks is not None:
        column = xp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = xp.concatenate([scores, column], axis=-1)
    powers = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    return xp.einsum("bnts,bnvs->btnv", shares[..., : keys.shape[2]], values)


def case(starts, tokens, slots, seed=0):
    batch = len(starts)
    arrays = (
        random(seed, batch, tokens, HEADS, DIM),
        random(seed + 1, batch, KV_HEADS, slots, DIM),
        random(seed + 2, batch, KV_HEADS, WIDTH, slots),
    )
    return arrays, span_of(starts, [tokens] * batch, tokens)


@both
@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_the_textbooks(kind, window, with_sinks):
    for starts, tokens, slots in (([0, 0], 20, 128), ([3, 290], 9, 384), ([127, 700], 1, 768)):
        arrays, span = case(starts, tokens, slots)
        sinks = random(9, HEADS) * 3 if with_sinks else None
        made = run(kind, *arrays, span, sinks, window=window)
        np.testing.assert_allclose(made, textbook(*arrays, span, sinks, window), atol=2e-5)


@both
def test_huge_scores_neither_overflow_nor_vanish(kind):
    (queries, keys, values), span = case([130], 4, 256)
    for factor in (1e4, 1e-30):
        made = run(kind, queries * np.float32(factor), keys, values, span)
        expected = textbook(queries.astype(np.float64) * factor, keys.astype(np.float64), values, span)
        assert np.isfinite(made).all()
        # Scores of 1e4 carry rounding errors of 1e-3 each.
        np.testing.assert_allclose(made, expected, atol=2e-2 if factor > 1 else 2e-5)


@both
def test_slots_that_nobody_sees_may_hold_anything_finite(kind):
    (queries, keys, values), span = case([140, 7], 3, 384)
    clean = np.asarray(run(kind, queries, keys, values, span))
    for row, end in enumerate((143, 10)):
        keys[row, :, end:] = 3e38
        values[row, :, :, end:] = -3e38
    assert np.array_equal(run(kind, queries, keys, values, span), clean)


@NATIVE
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("window", [None, 5])
def test_slots_that_are_not_finite_reach_only_tokens_that_see_them(bad, window):
    """Neighbours of one tile of rows, and of one step of slots, among those that don't."""
    (queries, keys, values), span = case([100, 0], 40, 256)
    clean = np.asarray(run("native", queries, keys, values, span, window=window))
    for row, start in enumerate((100, 0)):
        keys[row, :, start + 17] = values[row, :, :, start + 17] = bad
        keys[row, :, start + 40 :] = values[row, :, :, start + 40 :] = bad
    made = np.asarray(run("native", queries, keys, values, span, window=window))
    seeing = slice(17, 17 + window if window else None)
    blind = np.delete(np.arange(40), seeing)
    assert np.isnan(made[:, seeing]).all()
    assert np.array_equal(made[:, blind], clean[:, blind])


@both
def test_padding_that_sees_nothing_is_finite(kind):
    (queries, keys, values), _ = case([0], 200, 256)
    span = span_of([0], [5], 200)
    assert np.isfinite(run(kind, queries, keys, values, span, window=4)).all()


@both
def test_a_token_that_is_not_finite_keeps_it_to_itself(kind):
    (queries, keys, values), span = case([100, 0], 40, 256)
    clean = np.asarray(run(kind, queries, keys, values, span))
    queries[0, 7, 3, 5] = np.nan
    made = np.array(run(kind, queries, keys, values, span))
    assert np.isnan(made[0, 7, 3]).all()
    made[0, 7, 3] = clean[0, 7, 3]
    assert np.array_equal(made, clean)


@both
def test_gradients_are_the_textbooks(kind):
    arrays, span = case([0, 0], 130, 256)
    weight = random(5, 2, 130, HEADS, WIDTH)
    sinks = random(6, HEADS)

    def loss(function, *arguments):
        return (function(*arguments[:3], span, arguments[3]) * weight).sum()

    made = jax.grad(functools.partial(loss, functools.partial(run, kind)), argnums=(0, 1, 2, 3))(
        *arrays, sinks
    )
    expected = jax.grad(functools.partial(loss, functools.partial(textbook, xp=jnp)), argnums=(0, 1, 2, 3))(
        *map(jnp.asarray, arrays), jnp.asarray(sinks)
    )
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4 * float(jnp.abs(other).max()))


@both
@pytest.mark.parametrize("window", [None, 40])
def test_bits_depend_on_the_row_alone(kind, window):
    """Sizes at which the native kernel splits a chunk of tokens by segments, or doesn't."""
    attention = functools.partial(run, kind, window=window)
    starts, tokens = [0, 529, 60], 33
    (queries, keys, values), span = case(starts, tokens, 640)
    whole = np.asarray(attention(queries, keys, values, span))
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        alone = attention(queries[one], keys[one], values[one], span_of([start], [tokens], tokens))
        assert_same_bits(alone[0], whole[row])
        if start + tokens <= 256:
            few = keys[one, :, :256], values[one, ..., :256]  # another cache size
            made = attention(queries[one], *few, span_of([start], [tokens], tokens))
            assert_same_bits(made[0], whole[row])
        for offset in (0, 17, 32):  # one token per call
            token = span_of([start + offset], [1], 1)
            made = attention(queries[one, offset : offset + 1], keys[one], values[one], token)
            assert_same_bits(made[0, 0], whole[row, offset])


@NATIVE
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set():
    for tokens in (1, 200):
        arrays, span = case([900 - tokens, 300], tokens, 1024)
        expected = np.asarray(run("native", *arrays, span))
        for name in ffi.instruction_sets():
            with ffi.using_instruction_set(name), ffi.thread_limit(1):
                assert_same_bits(run("native", *arrays, span), expected, name)


@NATIVE
def test_a_zero_has_the_same_sign_whatever_the_neighbours():
    """A mixture that underflows from below is -0, and slots that only a neighbour sees add +0 to it."""
    heads, start = 16, 319  # the last slot of a step: the token behind it sees another one
    queries = np.zeros((1, 2, heads, 16), np.float32)
    keys = np.zeros((1, heads, 16, 384), np.float32)
    values = np.zeros((1, heads, 384, 16), np.float32)
    queries[..., 0] = 1
    keys[:, :, 0, 256] = 40 * np.log(2)  # in the second segment of slots
    values[:, :, [0, start]] = -(2.0**-120)
    values[:, :, start + 1 :] = 1

    def first_row(heads, tokens, threads):
        span = span_of([start], [tokens], tokens)
        with ffi.thread_limit(threads):
            operands = queries[:, :tokens, :heads], keys[:, :heads], values[:, :heads]
            return np.asarray(attend_native(*operands, span, scale=1.0))[0, 0, 0]

    expected = first_row(heads, 1, 1)
    assert not expected.any()
    for work in ((heads, 2, 1), (1, 1, 1), (1, 2, 2)):
        assert_same_bits(first_row(*work), expected, str(work))


@NATIVE
def test_padding_gets_zeros_and_costs_nobody_anything():
    arrays, _ = case([10, 200], 9, 256)
    made = np.array(run("native", *arrays, span_of([10, 200], [9, 4], 9)))
    whole = np.asarray(run("native", *arrays, span_of([10, 200], [9, 9], 9)))
    assert not made[1, 4:].any()
    made[1, 4:] = whole[1, 4:]
    assert_same_bits(made, whole)


@NATIVE
@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 3), (127, 2)])
def test_spans_outside_the_cache_are_errors(start, length):
    arrays, _ = case([0], 2, 128)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"row 0 has {length} of 2 tokens from position"):
        jax.block_until_ready(run("native", *arrays, span_of([start], [length], 2)))


@NATIVE
def test_mapped_attention_is_that_of_a_larger_batch():
    (queries, keys, values), span = case([5, 100, 3, 60], 7, 128)
    whole = run("native", queries, keys, values, span)
    pairs = [a.reshape(2, 2, *a.shape[1:]) for a in (queries, keys, values, span.starts, span.lengths)]
    made = jax.vmap(lambda q, k, v, s, n: run("native", q, k, v, Span(s, n, 7)))(*pairs)
    assert_same_bits(made.reshape(whole.shape), whole)


def test_a_span_says_who_sees_what():
    span = span_of([2, 0], [1, 3], 3)
    assert span.positions.tolist() == [[2, 3, 4], [0, 1, 2]]
    assert span.real.tolist() == [[True, False, False], [True, True, True]]
    assert span.ends.tolist() == [3, 3]
    slots = jnp.arange(5)
    assert span.mask(slots)[0].astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert span.mask(slots, 2)[0].astype(int).tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert cache_slots(1) == 128
    assert cache_slots(129) == 256


def test_tokens_are_stored_in_the_slots_of_their_positions():
    new = random(0, 2, 3, 4)
    stored = np.asarray(
        jax.jit(store, static_argnames="axis")(jnp.zeros((2, 8, 4)), new, span_of([5, 0], [3, 2], 3), axis=1)
    )
    expected = np.zeros((2, 8, 4), np.float32)
    expected[0, 5:8], expected[1, 0:3] = new
    assert np.array_equal(stored, expected)


# ---------------------------------------------------------------------------------------------------------
# The operations around attention.

ROWS = (1, 2, 3, 7, 16, 33, 100)


@pytest.mark.parametrize("size", [48, 200, 256])
def test_a_norms_bits_depend_on_the_row_alone(size):
    norm = jax.jit(RMSNorm(jnp.asarray(random(0, size)), 1e-6))
    x = random(1, 100, size)
    alone = np.concatenate([np.asarray(norm(x[row : row + 1])) for row in range(100)])
    for rows in ROWS:
        assert np.array_equal(norm(x[:rows]), alone[:rows])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 7), (128, 32), (200, 256)])
def test_a_float_matmuls_bits_depend_on_the_row_alone(dtype, inputs, outputs):
    weight = jnp.asarray(random(0, outputs, inputs), dtype)
    x = random(1, 100, inputs)
    function = jax.jit(matmul_float)
    alone = np.concatenate([np.asarray(function(x[row : row + 1], weight)) for row in range(100)])
    for rows in ROWS:
        assert np.array_equal(function(x[:rows], weight), alone[:rows])


def test_products_of_batches_don_t_depend_on_rows_or_batch():
    x, y = random(0, 3, 70, 48), random(1, 3, 20, 48)
    function = jax.jit(invariance.matmul_transposed)
    whole = np.asarray(function(x, y))
    np.testing.assert_allclose(whole, x @ y.swapaxes(1, 2), atol=1e-4)
    for rows in (1, 2, 64):
        assert np.array_equal(function(x[1:2, :rows], y[1:2])[0], whole[1, :rows])


def test_rounding_a_product_changes_nothing_but_minus_infinity():
    x = np.array([1.5, -0.0, np.nan, np.inf, -np.inf], np.float32)
    made = np.asarray(invariance.rounded(x))
    assert np.array_equal(made[:4], x[:4], equal_nan=True)
    assert made[4] == np.finfo(np.float32).min
