"""Routing against loops in float64, and the faults that public systems had in it."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_w4a8.routing import SCORINGS, Routing, route


def score(logits, scoring):
    if scoring == "softmax":
        peak = max(logits)
        powers = [math.exp(x - peak) for x in logits]
        return [p / sum(powers) for p in powers]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x)) for x in logits]
    return [math.sqrt(math.log1p(math.exp(-abs(x))) + max(x, 0)) for x in logits]


def reference_token(logits, routing, bias):
    """One token in Python floats: weights and ids."""
    logits = [float(x) for x in logits]
    scores = score(logits, routing.scoring)
    ranks = scores if bias is None else [s + float(b) for s, b in zip(scores, bias, strict=True)]
    candidates = list(range(len(logits)))
    groups = routing.num_expert_group or 1
    if groups > 1:
        size = len(logits) // groups
        kind = routing.group_score or ("max" if bias is None else "top2_sum")
        best = []
        for group in range(groups):
            members = sorted(ranks[group * size : (group + 1) * size], reverse=True)
            best.append(members[0] if kind == "max" else sum(members[:2]))
        kept = sorted(range(groups), key=lambda g: (-best[g], g))[: routing.topk_group]
        candidates = [e for e in candidates if e // size in kept]
    ids = sorted(candidates, key=lambda e: (-ranks[e], e))[: routing.top_k]
    weights = [scores[e] for e in ids]
    if routing.renormalize:
        total = sum(weights)
        weights = [w / (total + routing.renormalize_epsilon) if total else 0.0 for w in weights]
    return [w * routing.routed_scaling_factor for w in weights], ids


def reference(logits, routing, bias=None):
    rows = [reference_token(row, routing, bias) for row in np.asarray(logits)]
    return np.array([w for w, _ in rows]), np.array([i for _, i in rows])


def random_logits(shape, seed=0, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def random_bias(num_experts):
    return np.random.default_rng(99).uniform(-0.3, 0.3, num_experts).astype(np.float32)


def assert_bits_equal(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def run(logits, routing, bias=None):
    """``route`` with numpy results: slicing jax arrays would compile a program per slice."""
    weights, ids = route(logits, routing, bias)
    assert weights.dtype == jnp.float32
    assert ids.dtype == jnp.int32
    return np.asarray(weights), np.asarray(ids)


# name: E, biased, routing
FAMILIES = {
    "mixtral": (8, False, Routing(2)),
    "gpt-oss": (32, False, Routing(4)),
    "olmoe": (64, False, Routing(8, renormalize=False)),
    "qwen2": (60, False, Routing(4, renormalize=False)),
    "llama4": (16, False, Routing(1, "sigmoid", renormalize=False)),
    "ernie": (64, True, Routing(6)),
    "lfm2": (32, True, Routing(4, "sigmoid", renormalize_epsilon=1e-6)),
    "deepseek-v2": (
        160,
        False,
        Routing(6, "softmax", False, 8, 3, routed_scaling_factor=16.0),
    ),
    "deepseek-v3": (256, True, Routing(8, "sigmoid", True, 8, 4, None, 2.5, 1e-20)),
    "deepseek-v4": (
        64,
        True,
        Routing(6, "sqrtsoftplus", routed_scaling_factor=1.5, renormalize_epsilon=1e-20),
    ),
    "groups-max-biased": (32, True, Routing(3, "sigmoid", True, 8, 2, "max")),
    "groups-top2-unbiased-sqrtsoftplus": (
        32,
        False,
        Routing(3, "sqrtsoftplus", False, 4, 1, "top2_sum"),
    ),
    "groups-of-one": (8, True, Routing(2, "sigmoid", True, 8, 3)),
    "all-experts": (5, False, Routing(5, "sqrtsoftplus")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_matches_loops(family):
    num_experts, biased, routing = FAMILIES[family]
    logits = random_logits((40, num_experts))
    bias = random_bias(num_experts) if biased else None
    weights, ids = run(logits, routing, bias)
    expected_weights, expected_ids = reference(logits, routing, bias)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=2e-6)


@pytest.mark.parametrize(
    ("renormalize", "expected"),
    [(False, [0.6439142599, 0.2368828181]), (True, [0.7310585786, 0.2689414214])],
)
def test_softmax_comes_before_the_choice(renormalize, expected):
    weights, ids = run(np.array([2.0, 1, 0, -1]), Routing(2, renormalize=renormalize))
    assert ids.tolist() == [0, 1]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    np.testing.assert_allclose(weights.sum(), 1 if renormalize else 0.880797, rtol=1e-6)


def test_renormalised_softmax_is_softmax_over_the_chosen():
    logits = random_logits((30, 32), seed=1)
    routing = Routing(4)
    weights, ids = run(logits, routing)
    chosen = np.take_along_axis(logits, ids, -1)
    np.testing.assert_allclose(weights, np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True), rtol=1e-6)
    # Also where the bias chooses experts whose share of all scores underflows.
    weights, ids = run(np.array([200.0, -1, 0, 1]), Routing(2), np.array([0.0, 0, 5, 5]))
    assert ids.tolist() == [2, 3]
    np.testing.assert_allclose(weights, [1 / (1 + math.e), math.e / (1 + math.e)], rtol=1e-6)


@pytest.mark.parametrize(("groups", "topk_group"), [(None, 1), (0, None), (0, 0), (1, 1)])
def test_no_groups_is_plain_top_k(groups, topk_group):
    logits = random_logits((7, 8), seed=2)
    bias = random_bias(8)
    plain = run(logits, Routing(3, "sigmoid"), bias)
    routing = Routing(3, "sigmoid", num_expert_group=groups, topk_group=topk_group)
    same = run(logits, routing, bias)
    assert_bits_equal(plain[0], same[0])
    assert_bits_equal(plain[1], same[1])


def test_groups_limit_the_choice():
    logits = np.array([5.0, -9, -9, 4, 3, 3, -9, -9])
    best = Routing(3, num_expert_group=4, topk_group=2)
    assert run(logits, best)[1].tolist() == [0, 3, 1]
    pairs = dataclasses.replace(best, scoring="sqrtsoftplus", group_score="top2_sum")
    # Sums by group: 2.24, 2.00 + 0.01, 3.49, 0.02; so groups 2 and 0.
    assert run(logits, pairs)[1].tolist() == [0, 4, 5]


@pytest.mark.parametrize(("scoring", "renormalize"), [("softmax", False), ("sigmoid", True)])
def test_scaling_factor_multiplies_once(scoring, renormalize):
    logits = random_logits((9, 16), seed=3)
    plain = Routing(4, scoring, renormalize)
    scaled = dataclasses.replace(plain, routed_scaling_factor=2.5)
    weights, ids = run(logits, plain)
    scaled_weights, scaled_ids = run(logits, scaled)
    assert_bits_equal(ids, scaled_ids)
    np.testing.assert_allclose(scaled_weights, 2.5 * weights, rtol=1e-7)
    if renormalize:
        np.testing.assert_allclose(scaled_weights.sum(-1), 2.5, rtol=1e-6)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("step", [1e-4, 2.0**-20])
def test_close_logits_keep_their_order(scoring, step):
    logits = np.full(16, -3, np.float32)
    logits[11] = np.float32(8 + step)
    logits[4] = 8
    weights, ids = run(logits, Routing(2, scoring))
    assert ids.tolist() == [11, 4]
    assert weights[0] >= weights[1]


def test_saturated_scores_keep_the_order_of_logits():
    logits = np.array([20.0, 40, 30, 10])
    assert run(logits, Routing(3, "sigmoid"))[1].tolist() == [1, 2, 0]
    logits = np.array([0.0, -300, -200, -400])
    weights, ids = run(logits, Routing(3, renormalize=False))
    assert ids.tolist() == [0, 2, 1]
    assert weights.tolist() == [1, 0, 0]


def test_narrow_logits_are_widened_at_once():
    logits = random_logits((5, 24), seed=4).astype(jnp.bfloat16)
    weights, ids = run(logits, Routing(3))
    wide_weights, wide_ids = run(logits.astype(np.float32), Routing(3))
    assert_bits_equal(weights, wide_weights)
    assert_bits_equal(ids, wide_ids)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=3e-7)


def test_correction_bias_stays_float32():
    bias = np.zeros(8, np.float32)
    bias[2], bias[6] = 12.001, 12.002
    assert jnp.bfloat16(bias[2]) == jnp.bfloat16(bias[6])
    _, ids = run(np.zeros(8, jnp.bfloat16), Routing(2, "sigmoid"), bias)
    assert ids.tolist() == [6, 2]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_correction_bias_never_enters_weights(scoring):
    bias = np.array([0, 0, 50, 0, 60, 0, 0, 0], np.float32)
    logits = random_logits(8, seed=5)
    weights, ids = run(logits, Routing(2, scoring, renormalize=False), bias)
    assert ids.tolist() == [4, 2]
    expected = score([float(x) for x in logits], scoring)
    np.testing.assert_allclose(weights, [expected[4], expected[2]], rtol=2e-6)


@pytest.mark.parametrize(("renormalize", "groups"), [(True, None), (False, 8)])
def test_negative_logits_route_alike(renormalize, groups):
    # Multiples of 1/64, so that the subtraction is exact.
    logits = np.round(random_logits((20, 256), seed=6) * 64).astype(np.float32) / 64
    routing = Routing(8, "softmax", renormalize, groups, groups and 4)
    weights, ids = run(logits, routing)
    shifted_weights, shifted_ids = run(logits - 1000, routing)
    assert_bits_equal(ids, shifted_ids)
    assert_bits_equal(weights, shifted_weights)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("offset", [-20.0, -60.0])
def test_negative_logits_match_loops(scoring, offset):
    logits = random_logits((6, 16), seed=7) + np.float32(offset)
    routing = Routing(4, scoring, renormalize=False)
    weights, ids = run(logits, routing)
    expected_weights, expected_ids = reference(logits, routing)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("value", [0.0, 3.0, -700.0, -math.inf])
def test_equal_logits_choose_lowest_ids(scoring, value):
    logits = np.full((3, 64), value)
    _, ids = run(logits, Routing(8, scoring))
    assert ids.tolist() == [list(range(8))] * 3


@pytest.mark.parametrize("value", [0.0, -700.0])
def test_equal_groups_choose_lowest_ids(value):
    logits = np.full((3, 64), value)
    _, ids = run(logits, Routing(8, "sigmoid", True, 16, 3), np.zeros(64))
    assert ids.tolist() == [list(range(8))] * 3


def test_ties_choose_lowest_ids():
    logits = np.random.default_rng(8).integers(-2, 2, (200, 60)).astype(np.float32)
    logits[::2] *= np.where(logits[::2] == 0, -1.0, 1.0)  # -0 and 0 are the same
    _, ids = run(logits, Routing(9))
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :9])
    _, ids = run(np.array([0.0, -0.0, 0.0, -0.0])[::-1], Routing(4))
    assert ids.tolist() == [0, 1, 2, 3]


BAD_ROWS = {
    "nan": [math.nan] * 16,
    "one-nan": [1.0, math.nan] + [0.0] * 14,
    "negative-nan": [1.0, float(np.copysign(math.nan, -1))] + [0.0] * 14,
    "inf": [math.inf] * 16,
    "two-inf": [0.0] * 7 + [math.inf] + [1.0] * 7 + [math.inf],
    "minus-inf": [-math.inf] * 16,
    "mixed": [math.nan, math.inf, -math.inf, 0.0] * 4,
    "one-finite": [-math.inf] * 15 + [0.0],
    "huge": [3e38, -3e38] * 8,
}


@pytest.mark.parametrize(("groups", "biased"), [(None, False), (4, True)])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_bad_rows_keep_ids_valid_and_to_themselves(scoring, groups, biased):
    clean = random_logits((len(BAD_ROWS), 16), seed=9)
    both = np.stack([np.array(list(BAD_ROWS.values()), np.float32), clean], axis=1)
    bias = random_bias(16) if biased else None
    routing = Routing(5, scoring, True, groups, groups and 2)
    weights, ids = run(both, routing, bias)
    for name, row in zip(BAD_ROWS, ids[:, 0], strict=True):
        assert len(set(row.tolist())) == 5, (name, row)
        assert row.min() >= 0, (name, row)
        assert row.max() < 16, (name, row)
    expected = run(np.stack([clean, clean], axis=1), routing, bias)
    assert_bits_equal(weights[:, 1], expected[0][:, 1])
    assert_bits_equal(ids[:, 1], expected[1][:, 1])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_nan_is_not_hidden(scoring, sign):
    logits = np.zeros(16, np.float32)
    logits[3] = np.copysign(np.float32(math.nan), sign)
    weights, ids = run(logits, Routing(2, scoring))
    assert ids[0] == 3
    assert math.isnan(weights[0])


def test_minus_infinity_masks_an_expert():
    logits = np.array([-math.inf, 1.0, -math.inf, 0.0])
    weights, ids = run(logits, Routing(3))
    assert ids.tolist() == [1, 3, 0]
    np.testing.assert_allclose(weights, [math.e / (1 + math.e), 1 / (1 + math.e), 0], rtol=1e-6)
    # A masked expert of a chosen group still comes before any expert of another group.
    routing = Routing(2, "softmax", True, 2, 1)
    logits = np.array([0.0, 0, -math.inf, 1])
    assert run(logits, routing)[1].tolist() == [3, 2]


@pytest.mark.parametrize(
    ("scoring", "epsilon"),
    [("softmax", 1e-6), ("sigmoid", 0.0), ("sigmoid", 1e-6), ("sqrtsoftplus", 1e-6)],
)
def test_epsilon_and_sum_of_zero(scoring, epsilon):
    # Logits so low that an epsilon of 1e-6 counts; then rows whose scores are all zero.
    logits = random_logits((6, 8), seed=10) - np.float32(14)
    logits[4:] = -math.inf if scoring == "softmax" else -1000
    routing = Routing(2, scoring, renormalize_epsilon=epsilon)
    weights, ids = run(logits, routing)
    expected, _ = reference(logits[:4], routing)
    np.testing.assert_allclose(weights[:4], expected, rtol=3e-6)
    if scoring == "sigmoid":
        assert (weights[:4].sum(-1) < 0.99).all() == (epsilon > 0)
    assert weights[4:].tolist() == [[0, 0]] * 2
    assert ids[4:].tolist() == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("num_experts", "scoring", "epsilon"),
    [
        (1, "softmax", 0.0),
        (8, "softmax", 1e-20),
        (60, "softmax", 0.0),
        (60, "sigmoid", 0.0),
        (8, "sqrtsoftplus", 1e-20),
    ],
)
def test_one_renormalised_expert_weighs_one(num_experts, scoring, epsilon):
    logits = random_logits((200, num_experts), seed=11, scale=5)
    weights, _ = run(logits, Routing(1, scoring, renormalize_epsilon=epsilon))
    assert (weights == 1).all()


@pytest.mark.parametrize("lead", [(), (0,), (2, 3), (2, 0, 3)])
def test_leading_axes(lead):
    logits = random_logits((*lead, 12), seed=12)
    routing = Routing(3, "sigmoid", True, 3, 2)
    weights, ids = run(logits, routing, random_bias(12))
    assert weights.shape == ids.shape == (*lead, 3)
    flat_weights, flat_ids = reference(logits.reshape(-1, 12), routing, random_bias(12))
    np.testing.assert_array_equal(ids.reshape(-1, 3), flat_ids.reshape(-1, 3))
    np.testing.assert_allclose(weights.reshape(-1, 3), flat_weights.reshape(-1, 3), rtol=2e-6)


@pytest.mark.parametrize(
    ("num_experts", "size", "biased", "routing"),
    [
        (60, 7, False, Routing(4, renormalize=False)),
        (8, 1, False, Routing(8, "sigmoid", renormalize=False)),
        (64, 1, True, Routing(6, "sigmoid", True, 4, 2, None, 2.5, 1e-20)),
    ],
)
def test_bits_do_not_depend_on_the_batch(num_experts, size, biased, routing):
    logits = random_logits((300, num_experts), seed=13, scale=3) - np.float32(2)
    bias = random_bias(num_experts) if biased else None
    weights, ids = run(logits, routing, bias)
    for start in range(0, 150, size):
        part = slice(start, start + size)
        some_weights, some_ids = run(logits[part], routing, bias)
        assert_bits_equal(some_weights, weights[part])
        assert_bits_equal(some_ids, ids[part])
    mapped = jax.jit(jax.vmap(lambda x: route(x, routing, bias)))(logits)
    assert_bits_equal(mapped[0], weights)
    assert_bits_equal(mapped[1], ids)


@pytest.mark.parametrize(
    ("scoring", "renormalize"),
    [("softmax", True), ("softmax", False), ("sigmoid", True), ("sqrtsoftplus", False)],
)
def test_gradient_matches_differences(scoring, renormalize):
    logits = random_logits((2, 8), seed=14)
    routing = Routing(3, scoring, renormalize, routed_scaling_factor=1.5)
    direction = np.array([0.3, -1.0, 2.0])

    def loss(x):
        return (route(x, routing)[0] * direction.astype(np.float32)).sum()

    gradient = jax.jit(jax.grad(loss))(logits)
    step = 1e-5
    expected = np.zeros(logits.shape)
    for t, e in np.ndindex(logits.shape):
        ends = []
        for sign in (1, -1):
            moved = logits.astype(np.float64)
            moved[t, e] += sign * step
            ends.append((reference(moved, routing)[0] * direction).sum())
        expected[t, e] = (ends[0] - ends[1]) / (2 * step)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradient_is_finite_and_ignores_the_choice(scoring):
    rows = [[-1000.0] * 8, [1000.0] * 8, [0.0] * 8, [-90.0, 90, 0, -200, 1e4, -1e4, 5, 5]]
    logits = np.array([*rows, [-math.inf] * 4 + [0.0] * 4], np.float32)
    routing = Routing(3, scoring, True, 4, 2)

    def loss(x, bias):
        weights, ids = route(x, routing, bias)
        return (weights * jnp.array([1.0, 2, 3])).sum(), ids

    (by_logits, by_bias), ids = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(logits, jnp.zeros(8))
    assert ids.dtype == jnp.int32
    assert np.isfinite(by_logits).all()
    assert (np.asarray(by_bias) == 0).all()


def test_one_renormalised_expert_has_no_gradient():
    loss = jax.jit(lambda x: route(x, Routing(1))[0].sum())
    gradient = jax.grad(loss)(random_logits((3, 8)))
    assert (np.asarray(gradient) == 0).all()


def test_sixty_four_bits_change_nothing():
    logits = random_logits((4, 16), seed=15)
    routing = Routing(2, "sigmoid", routed_scaling_factor=np.float64(2.5))
    weights, ids = run(logits, routing, np.zeros(16, np.float32))
    with jax.enable_x64(True):
        wide_weights, wide_ids = run(logits.astype(np.float64), routing, np.zeros(16))
        assert_bits_equal(wide_weights, weights)
        assert_bits_equal(wide_ids, ids)


def test_routing_is_static():
    routing = Routing(2, num_expert_group=2, topk_group=1)
    assert hash(routing) == hash(dataclasses.replace(routing))
    assert jax.tree.leaves(routing) == []
    by_name = jax.jit(route, static_argnames="routing")
    as_argument = jax.jit(route)
    logits = random_logits((3, 8))
    assert_bits_equal(by_name(logits, routing=routing)[1], run(logits, routing)[1])
    assert_bits_equal(as_argument(logits, routing)[1], run(logits, routing)[1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer, got 2.0"),
        ({"top_k": True}, TypeError, "top_k must be an integer, got True"),
        ({"scoring": "tanh"}, ValueError, "scoring must be one of .*softmax.* got 'tanh'"),
        ({"renormalize": "false"}, TypeError, "renormalize must be True or False, got 'false'"),
        ({"num_expert_group": -1}, ValueError, "num_expert_group must be at least 0, got -1"),
        ({"num_expert_group": "2"}, TypeError, "num_expert_group .* integer or None, got '2'"),
        ({"num_expert_group": 4}, ValueError, r"topk_group must be in \[1, 4\] .* got None"),
        ({"num_expert_group": 4, "topk_group": 0}, ValueError, "topk_group .* got 0"),
        (
            {"num_expert_group": 4, "topk_group": 5},
            ValueError,
            "topk_group must be at most num_expert_group = 4, got 5",
        ),
        ({"topk_group": 2}, ValueError, "topk_group must be at most num_expert_group = None"),
        ({"group_score": "mean"}, ValueError, "group_score must be one of .*max.* got 'mean'"),
        ({"routed_scaling_factor": math.nan}, ValueError, "routed_scaling_factor .* got nan"),
        ({"routed_scaling_factor": "2"}, TypeError, "routed_scaling_factor .* got '2'"),
        ({"renormalize_epsilon": -1e-6}, ValueError, "renormalize_epsilon .* got -1e-06"),
    ],
)
def test_routing_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Routing(**{"top_k": 2, **arguments})


@pytest.mark.parametrize(
    ("num_experts", "routing", "message"),
    [
        (8, Routing(2, "softmax", True, 3, 1), "num_expert_group must divide .* 8, got 3"),
        (8, Routing(9), "top_k must be at most the number of experts, 8, got 9"),
        (8, Routing(5, "softmax", True, 4, 2), "top_k must be at most 4, .* got 5"),
        (0, Routing(1), "top_k must be at most the number of experts, 0, got 1"),
    ],
)
def test_route_refuses_experts_that_do_not_fit(num_experts, routing, message):
    with pytest.raises(ValueError, match=message):
        run(np.zeros((2, num_experts), np.float32), routing)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.zeros((2, 8), np.int32), Routing(2)), TypeError, "router_logits .* got int32"),
        ((np.float32(1), Routing(1)), ValueError, r"router_logits must have shape \[..., E\]"),
        ((np.zeros(8, np.float32), 2), TypeError, "routing must be a Routing, got int"),
        (
            (np.zeros(8, np.float32), Routing(2), np.zeros(8, np.int32)),
            TypeError,
            "correction_bias must be a floating point array, got int32",
        ),
        (
            (np.zeros((8, 8), np.float32), Routing(2), np.zeros((8, 8), np.float32)),
            ValueError,
            r"correction_bias must have shape \(8,\), got \(8, 8\)",
        ),
    ],
)
def test_route_refuses_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        route(*arguments)
