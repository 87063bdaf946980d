"""Every public function on inputs that nobody chose: against float64 numpy, another backend, or its inverse.

Sizes come from small sets, since each new shape is compiled; what the arrays hold is free.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import jax_w4a8 as w4a8
from jax_w4a8 import MoEConfig, QuantizedTensor, QuantizedWords, Routing, W4A8Int8MoeBackend

from . import reference
from .checkpoints import pack_words
from .reference import SCHEMES, Layer, assert_rows_close, assert_same_bits, compiled, on_device

native = pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here")

#: E, H, I, group size, biased: sizes that blocks and groups don't divide, one of everything, a usual one.
LAYERS = ((4, 64, 96, 32, True), (3, 40, 17, -1, False), (1, 1, 1, -1, True))
TOKENS, SLOTS = (0, 1, 5), (1, 3)
ACTIVATIONS = ("silu", "swigluoai", "gelu", "gelu_tanh")
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
#: Magnitudes of a row: zeros, the smallest that count, usual ones, large ones.
MAGNITUDES = (0.0, 1e-31, 1e-3, 1.0, 1e3)
SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def layer(number: int) -> tuple[Layer, w4a8.ExpertWeights]:
    experts, hidden, inner, group, biased = LAYERS[number]
    made = reference.random_layer(number, experts, hidden, inner, group, biased=biased)
    return made, made.packed()


def rows(rng: np.random.Generator, tokens: int, width: int, magnitudes: list[float], dtype) -> np.ndarray:
    scale = np.resize(np.asarray(magnitudes, np.float64), tokens)[:, None]
    return (rng.normal(size=(tokens, width)) * scale).astype(dtype)


def rearranged(x: np.ndarray, way: str) -> np.ndarray:
    """The same values in another place of memory."""
    if way == "transposed":
        return np.ascontiguousarray(x.T).T
    if way == "strided":
        wide = np.full((x.shape[0], 2 * x.shape[1]), np.nan, x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    if way == "backwards":
        return np.ascontiguousarray(x[::-1])[::-1]
    return x


WAYS = st.sampled_from(["plain", "transposed", "strided", "backwards"])


@st.composite
def calls(draw):
    """A layer's number, x, router weights, ids, and the activation's and scheme's names."""
    number = draw(st.integers(0, len(LAYERS) - 1))
    experts, hidden, *_ = LAYERS[number]
    tokens, slots = draw(st.sampled_from(TOKENS)), draw(st.sampled_from(SLOTS))
    rng = np.random.default_rng(draw(SEEDS))
    magnitudes = draw(st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=5))
    x = rows(rng, tokens, hidden, magnitudes, draw(st.sampled_from(DTYPES[:2])))
    values = st.sampled_from([0.0, -0.0, 1.0, -0.5, 0.3, 1e-30, 1e4])
    count = tokens * slots
    weights = draw(st.lists(values, min_size=count, max_size=count))
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=count, max_size=count))
    return (
        number,
        rearranged(x, draw(WAYS)),
        np.array(weights, np.float32).reshape(tokens, slots),
        np.array(ids, np.int32).reshape(tokens, slots),
        draw(st.sampled_from(ACTIVATIONS)),
        draw(st.sampled_from(SCHEMES)),
    )


@native
@given(calls())
def test_fused_experts_is_the_float64_model(call):
    number, x, weights, ids, activation, scheme = call
    made, packed = layer(number)
    y = compiled.fused_experts(
        x, weights, ids, packed, activation=activation, activation_scheme=scheme, backend="cpu_int4"
    )
    expected = reference.fused_experts(x.astype(np.float32), weights, ids, made, activation, scheme)
    # Cancelling slots have no relative error of their own: the largest magnitude of a slot counts.
    slots = reference.apply_experts(x.astype(np.float32), ids, made, activation, scheme).value
    size = np.abs(slots * weights[..., None]).sum(axis=(1, 2), keepdims=True)[:, 0]
    assert_rows_close(y, expected._replace(slack=expected.slack + 1e-5 * size), 1e-5)


@native
@given(calls())
def test_fused_experts_is_combine_of_apply_experts(call):
    number, x, weights, ids, activation, scheme = call
    packed = layer(number)[1]
    options = {"activation": activation, "activation_scheme": scheme, "backend": "cpu_int4"}
    whole = compiled.fused_experts(x, weights, ids, packed, **options)
    slots = compiled.apply_experts(x, ids, packed, **options)
    assert_same_bits(whole, compiled.combine(slots, weights, dtype=x.dtype.type, backend="cpu_int4"))


@native
@given(st.data(), SEEDS)
def test_backends_agree(data, seed):
    """The pure-JAX backend on one shape, which takes seconds to compile."""
    made, packed = layer(0)
    rng = np.random.default_rng(seed)
    magnitudes = data.draw(st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=5))
    x = rows(rng, 5, 64, magnitudes, np.float32)
    ids = rng.integers(-1, 4, (5, 3)).astype(np.int32)
    weights = rng.uniform(0, 1, (5, 3)).astype(np.float32)
    scheme = data.draw(st.sampled_from(SCHEMES))
    expected = reference.fused_experts(x, weights, ids, made, "silu", scheme)
    for backend in reference.BACKENDS:
        y = compiled.fused_experts(x, weights, ids, packed, activation_scheme=scheme, backend=backend)
        assert_rows_close(y, expected, 1e-4)


@native
@given(calls(), st.sampled_from([np.nan, np.inf, -np.inf]), SEEDS)
def test_what_is_not_finite_stays_in_its_row(call, value, seed):
    number, x, weights, ids, activation, scheme = call
    assume(x.size)
    packed = layer(number)[1]
    token, column = (int(n) for n in np.random.default_rng(seed).integers(0, x.shape))
    spoilt = np.array(x)
    spoilt[token, column] = value
    options = {"activation": activation, "activation_scheme": scheme, "backend": "cpu_int4"}
    clean = np.asarray(compiled.fused_experts(x, weights, ids, packed, **options))
    y = np.asarray(compiled.fused_experts(spoilt, weights, ids, packed, **options))
    others = np.arange(len(x)) != token
    assert_same_bits(y[others], clean[others])
    assert np.isnan(y[token].astype(np.float32)).all() == bool((ids[token] >= 0).any())


@native
@given(calls(), st.integers(1, 4))
def test_neither_threads_nor_neighbours_nor_instructions_change_a_bit(call, threads):
    number, x, weights, ids, activation, scheme = call
    packed = layer(number)[1]
    options = {"activation": activation, "activation_scheme": scheme, "backend": "cpu_int4"}
    whole = np.asarray(compiled.fused_experts(x, weights, ids, packed, **options))
    with w4a8.using_instruction_set(w4a8.instruction_sets()[0]), w4a8.thread_limit(threads):
        assert_same_bits(compiled.fused_experts(x, weights, ids, packed, **options), whole)
    if len(x):
        one = compiled.fused_experts(x[:1], weights[:1], ids[:1], packed, **options)
        assert_same_bits(one, whole[:1])


@native
@given(
    st.sampled_from([(1, 1, -1), (7, 33, 32), (16, 64, 32), (34, 80, 64), (2, 257, -1)]),
    st.sampled_from(TOKENS),
    st.sampled_from(DTYPES),
    st.sampled_from(SCHEMES),
    st.lists(st.sampled_from(MAGNITUDES), min_size=1, max_size=5),
    WAYS,
    SEEDS,
)
def test_linear_is_the_float64_model(shape, tokens, dtype, scheme, magnitudes, way, seed):
    outputs, inputs, group = shape
    rng = np.random.default_rng(seed)
    weights = reference.random_weights(rng, (outputs, inputs), group)
    bias = rng.normal(size=outputs).astype(np.float32)
    x = rearranged(rows(rng, tokens, inputs, magnitudes, dtype), way)
    packed = on_device(w4a8.pack_linear(weights, bias))
    y = compiled.linear(x, packed, activation_scheme=scheme, backend="cpu_int4")
    expected = reference.linear(x.astype(np.float32), weights, bias, scheme)
    slack = 1e-5 * np.abs(reference.linear(x.astype(np.float32), weights, None, scheme))
    spread = slack.max(axis=1, keepdims=True) if outputs else slack
    limit = np.finfo(dtype).max if dtype is np.float16 else np.inf
    assume((np.abs(expected) < limit).all())
    tiny = float(ml_dtypes.finfo(dtype).tiny)
    assert_rows_close(y, reference.Result(expected, spread + tiny), 1e-5)


@native
@given(st.lists(st.integers(0, 3), min_size=3, max_size=3), st.sampled_from(SCHEMES), SEEDS)
def test_ragged_dot_is_linear_group_by_group(sizes, scheme, seed):
    rng = np.random.default_rng(seed)
    weights = reference.random_weights(rng, (3, 10, 40), 32)
    x = rng.normal(size=(9, 40)).astype(np.float32)
    packed = on_device(w4a8.pack_linear(weights))
    y = np.asarray(w4a8.ragged_dot(x, packed, np.array(sizes), activation_scheme=scheme, backend="cpu_int4"))
    start = 0
    for group, size in enumerate(sizes):
        one = jax.tree.map(lambda leaf: leaf[group], packed)  # noqa: B023
        expected = compiled.linear(x, one, activation_scheme=scheme, backend="cpu_int4")
        assert_same_bits(y[start : start + size], np.asarray(expected)[start : start + size])
        start += size
    assert not y[start:].any()


CODES = st.sampled_from([(1, 1, -1), (2, 7, -1), (3, 33, 32), (5, 100, 64), (16, 64, 32)])


@given(CODES, st.sampled_from([np.float32, ml_dtypes.bfloat16]), SEEDS)
def test_packing_undone_gives_the_same_codes_and_scales(shape, dtype, seed):
    outputs, inputs, group = shape
    weights = reference.random_weights(np.random.default_rng(seed), (outputs, inputs), group, dtype)
    bias = np.random.default_rng(seed).normal(size=outputs).astype(np.float32)
    back, stored = w4a8.unpack_linear(w4a8.pack_linear(weights, bias))
    assert_same_bits(back.codes, weights.codes)
    assert_same_bits(back.scale, weights.scale)
    assert_same_bits(stored, bias)
    if group > 0:
        words = QuantizedWords(pack_words(weights.codes), weights.scale, inputs, group)
        for a, b in zip(
            jax.tree.leaves(w4a8.pack_linear(words)), jax.tree.leaves(w4a8.pack_linear(weights)), strict=True
        ):
            assert_same_bits(a, b)


@given(st.sampled_from(range(len(LAYERS))), st.booleans())
def test_experts_unpacked_are_those_that_were_packed(number, interleaved):
    made = layer(number)[0]
    back = w4a8.unpack_experts(w4a8.pack_experts(*made, interleaved=interleaved))
    if interleaved:  # gate and up channels alternated before, and are apart now
        order = np.r_[0 : 2 * made.shape[2] : 2, 1 : 2 * made.shape[2] : 2]
        first = [
            None if leaf is None else leaf[:, order] for leaf in (*jax.tree.leaves(made.w13), made.w13_bias)
        ]
        made = made._replace(w13=QuantizedTensor(*first[:2], made.w13.group_size), w13_bias=first[2])
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(made), strict=False):
        assert_same_bits(a, b)


@given(CODES, st.sampled_from(MAGNITUDES), SEEDS)
def test_quantising_is_off_by_half_a_step(shape, magnitude, seed):
    outputs, inputs, group = shape
    w = (np.random.default_rng(seed).normal(size=(outputs, inputs)) * magnitude).astype(np.float32)
    quantized = w4a8.quantize(w, group, scale_dtype=np.float32)
    step = np.repeat(np.abs(np.asarray(quantized.scale)), inputs if group < 0 else group, axis=1)[:, :inputs]
    error = np.abs(np.asarray(w4a8.dequantize(quantized), np.float64) - w)
    assert (error <= 0.5 * step * (1 + 1e-5)).all()  # 7.5 steps reach from the middle to the last code's edge
    assert_same_bits(
        jnp.asarray(w4a8.quantize_and_pack_linear(w, group_size=group, scale_dtype=np.float32).codes),
        w4a8.pack_linear(quantized).codes,
    )


@given(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]), st.booleans(), st.integers(1, 4), st.data())
def test_routing_chooses_the_best(scoring, renormalize, top_k, data):
    values = st.floats(-1e4, 1e4, width=32)
    logits = np.array(data.draw(st.lists(values, min_size=18, max_size=18)), np.float32).reshape(3, 6)
    weights, ids = w4a8.route(logits, Routing(top_k, scoring, renormalize))
    weights, ids = np.asarray(weights), np.asarray(ids)
    assert ids.shape == weights.shape == (3, top_k)
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    for row, chosen, given_weights in zip(logits, ids, weights, strict=True):
        assert len(set(chosen)) == top_k
        assert set(chosen) <= set(range(6))
        assert given_weights[0] == given_weights.max()
        if scoring == "softmax":  # scores of far apart logits are equal in float32, and ties go by number
            assert row[chosen[0]] == pytest.approx(row.max(), abs=110)
        if renormalize and given_weights.any():
            assert given_weights.sum() == pytest.approx(1, abs=1e-5)


@given(st.sampled_from(range(len(LAYERS))), st.booleans(), st.booleans())
def test_trainable_parts_put_back_change_nothing(number, biases, scales):
    packed = layer(number)[1]
    parts = w4a8.trainable_parts(packed, biases=biases, scales=scales)
    same = w4a8.with_trainable_parts(packed, parts)
    assert jax.tree.structure(same) == jax.tree.structure(packed)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(packed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@native
@given(calls())
def test_moe_is_route_then_experts(call):
    number, x, _, ids, activation, scheme = call
    packed, experts = layer(number)[1], LAYERS[number][0]
    routing = Routing(min(2, experts))
    logits = np.random.default_rng(ids.size).normal(size=(len(x), experts)).astype(np.float32)
    options = {"activation": activation, "activation_scheme": scheme, "backend": "cpu_int4"}
    weights, chosen = w4a8.route(logits, routing)
    expected = w4a8.fused_experts(x, weights, chosen, packed, **options)
    assert_same_bits(w4a8.moe(x, logits, packed, routing, **options), expected)


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([-1, 32, 64, 128]),
    st.sampled_from(["auto", "cpu_int4", "xla"]),
    st.sampled_from(["cpu", "gpu", "tpu"]),
)
def test_the_oracle_chooses_or_says_why_not(hidden, inner, experts, group, backend, platform):
    config = MoEConfig(
        num_experts=experts,
        top_k=1,
        hidden_size=hidden,
        intermediate_size=inner,
        platform=platform,
        moe_backend=backend,
    )
    key = w4a8.quantize(np.ones((1, 512), np.float32), group).key()
    explained = str(w4a8.explain(config, key))
    try:
        chosen, implementation = w4a8.select_w4a8_int8_moe_backend(config, key)
    except (ValueError, NotImplementedError) as error:
        reasons = str(error)
    else:
        reasons = ""
    if reasons:
        return
    assert isinstance(chosen, W4A8Int8MoeBackend)
    assert implementation.is_supported_config(config, key, None)[0]
    assert chosen.name in explained


def test_every_public_function_has_a_property():
    """Names that a person calls stand in this file, or are of the kind that only says something."""
    text = Path(__file__).read_text()
    told = {"DISABLE_JAX_EXPORT_CHECKS", "instruction_set", "release_scratch", "set_instruction_set"}
    types = {"Activation", "ExpertWeights", "GroupShape", "LinearWeights", "QuantKey"}
    missing = [name for name in w4a8.__all__ if name not in text and name not in told | types]
    assert not missing, missing


def test_quantising_experts_is_quantising_each():
    rng = np.random.default_rng(0)
    w13, w2 = rng.normal(size=(2, 34, 40)).astype(np.float32), rng.normal(size=(2, 40, 17)).astype(np.float32)
    packed = w4a8.quantize_and_pack_experts(w13, w2, group_size=-1)
    expected = w4a8.pack_experts(w4a8.quantize(w13, -1), w4a8.quantize(w2, -1))
    for a, b in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
        assert_same_bits(a, b)
