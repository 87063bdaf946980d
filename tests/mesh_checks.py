"""What holds on a mesh of eight devices. Run as a program, since the number of devices is fixed at start-up;
``test_sharding.py`` reports each ``check_*`` as a test of its own.

python -m tests.mesh_checks   # prints {name: null or traceback} as JSON
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
import time
import traceback
import warnings

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("error")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_w4a8 as w4a8
from jax_w4a8.sharding import (
    ExpertSharding,
    LinearSharding,
    named_shardings,
    partition_specs,
    place,
    place_experts,
    prepare,
)

E, H, K, T = 8, 64, 3, 16
KINDS = (AxisType.Auto, AxisType.Explicit)
BACKENDS = ["cpu_int4", "xla"] if w4a8.native_available() else ["xla"]
#: The pure-JAX backend takes seconds to compile for eight devices.
CASES = [(kind, BACKENDS[0]) for kind in KINDS] + [(AxisType.Explicit, backend) for backend in BACKENDS[1:]]
ROUTING = w4a8.Routing(K)


@functools.cache
def _mesh(kind=AxisType.Auto, shape=(2, 2, 2), names=("data", "expert", "tensor")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


@functools.cache
def _raw(group_size=32, inner=128):
    rng = np.random.default_rng(7)
    w13 = w4a8.quantize(rng.standard_normal((E, 2 * inner, H), np.float32), group_size)
    w2 = w4a8.quantize(rng.standard_normal((E, H, inner), np.float32), group_size)
    biases = rng.standard_normal((E, 2 * inner), np.float32), rng.standard_normal((E, H), np.float32)
    return w13, w2, *biases


@functools.cache
def _experts(group_size=32, inner=128):
    return w4a8.pack_experts(*_raw(group_size, inner))


@functools.cache
def _tokens(dtype="float32", k=K):
    rng = np.random.default_rng(3)
    x = np.asarray(jnp.asarray(rng.standard_normal((T, H), np.float32), dtype))
    weights = rng.random((T, k), np.float32)
    ids = np.argsort(rng.random((T, E)), axis=1)[:, :k].astype(np.int32)
    logits = rng.standard_normal((T, E), np.float32)
    return x, weights, ids, logits


def _same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}"))


def _compiled(function, *operands):
    return jax.jit(function).lower(*operands).compile().as_text()


def _collectives(text):
    """Names of the collectives that a compiled program starts, one entry per instruction."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf" ({kinds})(?:-start)?\(", text)


def _on(sharding, *arrays):
    return [jax.device_put(a, NamedSharding(sharding.mesh, sharding.token_spec(a.ndim))) for a in arrays]


def check_expert_parallel_bitwise_equals_one_device():
    for (kind, backend), dtype in itertools.product(CASES, ("float32", "bfloat16")):
        if (backend, dtype) == ("xla", "bfloat16"):
            continue
        x, weights, ids, logits = _tokens(dtype)
        sharding = ExpertSharding(_mesh(kind), ("data", "expert"), bitwise=True)
        placed = place(_experts(), sharding)
        call = functools.partial(w4a8.fused_experts, backend=backend)
        _same(call(x, weights, ids, placed, sharding=sharding), jax.jit(call)(x, weights, ids, _experts()))
        if backend == "xla":
            continue
        layer = functools.partial(w4a8.moe, routing=ROUTING, backend=backend)
        _same(layer(x, logits, placed, sharding=sharding), jax.jit(layer)(x, logits, _experts()))


def check_expert_parallel_changes_the_order_of_the_combine_alone():
    for kind, backend in CASES[:2]:
        sharding = ExpertSharding(_mesh(kind), ("data", "expert"))
        placed = place(_experts(), sharding)
        x, weights, ids, _ = _tokens()
        found = w4a8.fused_experts(x, weights, ids, placed, sharding=sharding, backend=backend)
        slots = np.asarray(w4a8.apply_experts(x, ids, _experts(), backend=backend))
        terms = slots.astype(np.float64) * weights[..., None]
        bound = 2 * K * 2.0**-24 * np.abs(terms).sum(axis=1)
        assert (np.abs(np.asarray(found, np.float64) - terms.sum(axis=1)) <= bound).all()
        x, weights, ids, _ = _tokens(k=1)  # nothing to reorder
        found = w4a8.fused_experts(x, weights, ids, placed, sharding=sharding, backend=backend)
        _same(found, w4a8.fused_experts(x, weights, ids, _experts(), backend=backend))


def check_expert_parallel_is_one_psum_on_slices():
    for kind, bitwise in itertools.product(KINDS, (False, True)):
        sharding = ExpertSharding(_mesh(kind), ("data", "expert"), bitwise=bitwise)
        placed = place(_experts(), sharding)
        x, _, _, logits = _tokens()
        layer = functools.partial(w4a8.moe, routing=ROUTING, sharding=sharding)
        text = _compiled(layer, x, logits, placed)
        assert _collectives(text) == ["all-reduce"], _collectives(text)
        if w4a8.native_available():
            call = re.search(r"custom_call_target=\"jax_w4a8_(fused|apply)_experts.*", text)[0]
            assert f"u8[{E // 4}," in call, call


def check_tokens_stay_where_they_are():
    for kind, how in itertools.product(KINDS, ("told", "seen")):
        mesh = _mesh(kind, (4,), ("data",))
        told = ExpertSharding(mesh, tokens="data")
        x, weights, ids, logits = _tokens()
        on = _on(told, x, weights, ids, logits)
        experts = jax.device_put(_experts(), NamedSharding(mesh, P()))
        sharding = told if how == "told" else None
        dense = _dense()
        where = None if sharding is None else LinearSharding(mesh, tokens="data")
        cases = [
            (functools.partial(w4a8.fused_experts, sharding=sharding), on[:3], (x, weights, ids), (experts,)),
            (
                lambda x, logits, e, **kw: w4a8.moe(x, logits, e, ROUTING, **kw),
                [on[0], on[3]],
                (x, logits),
                (experts,),
            ),
            (functools.partial(w4a8.apply_experts, sharding=sharding), [on[0], on[2]], (x, ids), (experts,)),
            (functools.partial(w4a8.linear, sharding=where), on[:1], (x,), (dense,)),
        ]
        cases[1] = (functools.partial(cases[1][0], sharding=sharding), *cases[1][1:])
        for function, arrays, plain, weights_of in cases:
            found = function(*arrays, *weights_of)  # concrete arrays show where they are, on both kinds
            _same(found, function.func(*plain, *(_experts() if w is experts else w for w in weights_of)))
            assert found.sharding.spec[0] == "data"
            if how == "seen" and kind == AxisType.Auto:
                continue  # inside jit, Auto axes can't be seen: the documented limit
            text = _compiled(function, *arrays, *weights_of)
            assert _collectives(text) == [], (function, _collectives(text))
            if w4a8.native_available():
                assert re.search(rf"custom_call_target=\"jax_w4a8.*f32\[{T // 4},{H}\]", text), text


def check_a_plain_custom_call_would_gather():
    """What the helpers are for: the assertion of no all-gather can fail."""
    if not w4a8.native_available():
        return
    mesh = _mesh(AxisType.Auto, (4,), ("data",))
    x, weights, ids, _ = _on(ExpertSharding(mesh, tokens="data"), *_tokens())
    assert "all-gather" in _collectives(_compiled(w4a8.fused_experts, x, weights, ids, _experts()))


def check_operands_need_not_be_placed():
    """Explicit meshes refuse to guess; being told, calls bring operands where they belong."""
    x, weights, ids, _ = _tokens()
    for kind in KINDS:
        sharding = ExpertSharding(_mesh(kind), "expert", tokens="data", bitwise=True)
        expected = w4a8.fused_experts(x, weights, ids, _experts())
        call = functools.partial(w4a8.fused_experts, sharding=sharding)
        _same(call(x, weights, ids, _experts()), expected)
        whole = jax.device_put(x, NamedSharding(sharding.mesh, P()))
        odd = jax.device_put(x, NamedSharding(sharding.mesh, P(None, "tensor")))
        for operand in (whole, odd, jnp.asarray(x)):
            _same(jax.jit(call)(operand, weights, ids, place(_experts(), sharding)), expected)


def check_sharding_is_seen_in_operands():
    for kind in KINDS:
        told = ExpertSharding(_mesh(kind), "expert", "tensor", P("data"))
        placed = place(_experts(), told)
        x, weights, ids, logits = _tokens()
        on = _on(told, x, weights, ids, logits)
        expected = w4a8.fused_experts(x, weights, ids, placed, sharding=told)
        _same(w4a8.fused_experts(*on[:3], placed), expected)
        _same(w4a8.moe(on[0], on[3], placed, ROUTING), w4a8.moe(x, logits, placed, ROUTING, sharding=told))
        if kind == AxisType.Explicit:
            _same(jax.jit(w4a8.fused_experts)(*on[:3], placed), expected)
            text = _compiled(w4a8.fused_experts, *on[:3], placed)
            assert _collectives(text) == ["all-reduce"]


def check_what_cannot_stay_split_warns():
    mesh = _mesh(AxisType.Explicit)
    x, weights, ids, _ = _tokens()
    odd = jax.device_put(x, NamedSharding(mesh, P(None, "tensor")))
    with pytest.warns(UserWarning, match=r"fused_experts can't keep .* split along its last axis"):
        found = w4a8.fused_experts(odd, weights, ids, _experts())
    _same(found, w4a8.fused_experts(x, weights, ids, _experts()))
    with pytest.warns(UserWarning, match=r"linear can't keep .* split along its inputs by 'tensor'"):
        found = jax.jit(w4a8.linear)(odd, _dense())
    _same(found, w4a8.linear(x, _dense()))
    auto = NamedSharding(_mesh(), P("expert", "tensor"))
    codes = jax.device_put(_experts().w13.codes, auto)
    lopsided = jax.tree.map(lambda leaf: codes if leaf is _experts().w13.codes else leaf, _experts())
    with pytest.warns(UserWarning, match="aren't prepared for slices"):
        w4a8.fused_experts(x, weights, ids, lopsided)


def _shards_alone(group_size, inner, parts):
    """Each tensor-parallel shard packed by itself, from slices of the unpacked weights."""
    w13, w2, w13_bias, w2_bias = _raw(group_size, inner)
    size = inner // parts
    for part in range(parts):
        own = slice(part * size, (part + 1) * size)
        groups = slice(None) if group_size == -1 else slice(own.start // group_size, own.stop // group_size)
        rows = np.r_[own, inner + own.start : inner + own.stop]
        yield w4a8.pack_experts(
            w4a8.QuantizedTensor(w13.codes[:, rows], w13.scale[:, rows], group_size),
            w4a8.QuantizedTensor(w2.codes[..., own], w2.scale[..., groups], group_size),
            w13_bias[:, rows],
            w2_bias if part == 0 else None,
        )


def check_tensor_parallel_is_the_sum_of_its_shards():
    x, weights, ids, _ = _tokens()
    sizes = [(-1, 96), (32, 128), (64, 128), (-1, 128)]
    for (group_size, inner), (kind, backend) in itertools.product(sizes, CASES):
        if backend == "xla" and inner != 96:
            continue
        sharding = ExpertSharding(_mesh(kind), tensor_axis="tensor", tokens="data")
        placed = place(_experts(group_size, inner), sharding)
        call = functools.partial(w4a8.fused_experts, x, weights, ids, backend=backend)
        first, second = (call(shard) for shard in _shards_alone(group_size, inner, 2))
        _same(call(placed, sharding=sharding), first + second)


def check_tensor_parallel_is_as_near_to_floats_as_one_device():
    x, weights, ids, _ = _tokens()
    for scheme, parts in itertools.product(("asymmetric", "symmetric"), (2, 4)):
        mesh = _mesh(AxisType.Auto, (parts,), ("tensor",))
        sharding = ExpertSharding(mesh, tensor_axis="tensor")
        w13, w2, w13_bias, w2_bias = (np.asarray(a, np.float64) for a in map(_floats, _raw()))
        hidden = np.einsum("th,tkih->tki", x, w13[ids]) + w13_bias[ids]
        gate, up = np.split(hidden, 2, axis=-1)
        slots = np.einsum("tki,tkhi->tkh", gate / (1 + np.exp(-gate)) * up, w2[ids]) + w2_bias[ids]
        exact = (slots * weights[..., None]).sum(axis=1)

        def error(experts, exact=exact, scheme=scheme, **kwargs):
            found = w4a8.fused_experts(x, weights, ids, experts, activation_scheme=scheme, **kwargs)
            return np.linalg.norm(np.asarray(found) - exact) / np.linalg.norm(exact)

        alone, spread = error(_experts()), error(place(_experts(), sharding), sharding=sharding)
        assert 1e-4 < spread < 1.02 * alone < 0.05, (scheme, parts, alone, spread)


def _floats(value):
    return w4a8.dequantize(value) if isinstance(value, w4a8.QuantizedTensor) else value


def check_all_three_at_once_are_one_psum():
    x, weights, ids, logits = _tokens()
    for kind in KINDS:
        sharding = ExpertSharding(_mesh(kind), "expert", "tensor", P("data"))
        placed = place(_experts(), sharding)
        on = _on(sharding, x, logits)
        text = _compiled(lambda *a, s=sharding: w4a8.moe(*a, ROUTING, sharding=s), *on, placed)
        assert _collectives(text) == ["all-reduce"]
        shards = [w4a8.fused_experts(x, weights, ids, shard) for shard in _shards_alone(32, 128, 2)]
        found = w4a8.fused_experts(x, weights, ids, placed, sharding=sharding)
        np.testing.assert_allclose(
            found, shards[0] + shards[1], rtol=0, atol=1e-5 * float(np.abs(found).max())
        )


def check_ids():
    x, weights, ids, _ = _tokens()
    sharding = ExpertSharding(_mesh(), ("data", "expert"), bitwise=True)
    placed = place(_experts(), sharding)
    for backend in BACKENDS:
        call = functools.partial(w4a8.fused_experts, backend=backend)
        absent = ids.copy()
        absent[::2, 1] = -1
        _same(call(x, weights, absent, placed, sharding=sharding), call(x, weights, absent, _experts()))
        none = np.full_like(ids, -1)
        assert not np.asarray(call(x, weights, none, placed, sharding=sharding)).any()
        for wrong in (E, -2, 2**31 - 1, -(2**31)):
            bad = ids.copy()
            bad[2, 1] = wrong
            if backend == "xla":
                nan = np.isnan(np.asarray(call(x, weights, bad, placed, sharding=sharding)))
                assert nan[2].all()
                assert not np.delete(nan, 2, axis=0).any()
                continue
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=rf"id {wrong} of token 2"):
                call(x, weights, bad, placed, sharding=sharding).block_until_ready()
        _same(call(x, weights, ids, placed, sharding=sharding), call(x, weights, ids, _experts()))


def check_router_weight_on_input():
    x, weights, ids, _ = _tokens(k=1)
    for bitwise, backend in itertools.product((False, True), BACKENDS[:1]):
        sharding = ExpertSharding(_mesh(), "expert", tokens="data", bitwise=bitwise)
        call = functools.partial(
            w4a8.fused_experts, x, weights, ids, apply_router_weight_on_input=True, backend=backend
        )
        _same(call(place(_experts(), sharding), sharding=sharding), call(_experts()))


def check_slots_and_combine():
    x, weights, ids, _ = _tokens()
    slots = w4a8.apply_experts(x, ids, _experts())
    for kind in KINDS:
        sharding = ExpertSharding(_mesh(kind), "expert", tokens="data")
        spread = w4a8.apply_experts(x, ids, place(_experts(), sharding), sharding=sharding)
        np.testing.assert_array_equal(spread, slots)  # -0 counts as 0
        on = _on(sharding, weights)
        _same(w4a8.combine(spread, *on, dtype=jnp.bfloat16), w4a8.combine(slots, weights, dtype=jnp.bfloat16))
        if kind == AxisType.Explicit:
            assert _collectives(_compiled(w4a8.combine, spread, *on)) == []


@functools.cache
def _dense(out=96, inner=H, group_size=32, seed=5):
    rng = np.random.default_rng(seed)
    matrix = w4a8.quantize(rng.standard_normal((out, inner), np.float32), group_size)
    return w4a8.pack_linear(matrix, rng.standard_normal(out, np.float32))


def check_linear_columns_are_bit_equal_and_stay_split():
    x = _tokens()[0].reshape(4, 4, H)
    for (kind, backend), group_size in itertools.product(CASES, (32, -1)):
        dense = _dense(group_size=group_size)
        sharding = LinearSharding(_mesh(kind), out_axis="tensor", tokens=P(None, "data"))
        y = w4a8.linear(x, place(dense, sharding), sharding=sharding, backend=backend)
        _same(y, w4a8.linear(x, dense, backend=backend))
        assert y.sharding.spec == P(None, "data", "tensor")


def check_linear_rows_are_the_sum_of_their_shards():
    x = _tokens()[0]
    for (kind, backend), group_size in itertools.product(CASES, (32, -1)):
        dense = _dense(group_size=group_size)
        tensor, bias = w4a8.unpack_linear(dense)
        parts = []
        for part, own in enumerate((slice(0, H // 2), slice(H // 2, H))):
            groups = slice(None) if group_size == -1 else slice(part, part + 1)
            half = w4a8.QuantizedTensor(tensor.codes[:, own], tensor.scale[:, groups], group_size)
            packed = w4a8.pack_linear(half, bias if part == 0 else None)
            parts.append(w4a8.linear(x[:, own], packed, backend=backend))
        for out_axis in (None, "expert"):
            sharding = LinearSharding(_mesh(kind), out_axis=out_axis, in_axis="tensor")
            y = w4a8.linear(x, place(dense, sharding), sharding=sharding, backend=backend)
            _same(y, parts[0] + parts[1])


def check_column_then_row_is_one_psum():
    for kind in KINDS:
        first = LinearSharding(_mesh(kind), out_axis="tensor")
        second = LinearSharding(_mesh(kind), in_axis="tensor")
        up, down = place(_dense(128), first), place(_dense(H, 128), second)

        def mlp(x, up, down, first=first, second=second):
            return w4a8.linear(jax.nn.relu(w4a8.linear(x, up, sharding=first)), down, sharding=second)

        x = jax.device_put(_tokens()[0], NamedSharding(_mesh(kind), P()))
        assert _collectives(_compiled(mlp, x, up, down)) == ["all-reduce"]
        if kind == AxisType.Explicit:  # types alone are enough
            seen = lambda x, up, down: w4a8.linear(jax.nn.relu(w4a8.linear(x, up)), down)  # noqa: E731
            _same(jax.jit(seen)(x, up, down), jax.jit(mlp)(x, up, down))


def check_devices_hold_their_slices_alone():
    sharding = ExpertSharding(_mesh(), "expert", "tensor")
    placed = place(_experts(), sharding)
    for leaf, spec in zip(
        jax.tree.leaves(placed),
        jax.tree.leaves(partition_specs(_experts(), sharding), is_leaf=lambda s: isinstance(s, P)),
        strict=True,
    ):
        parts = 1
        for entry in spec:
            parts *= 2 if entry is not None else 1
        for shard in leaf.addressable_shards:
            assert shard.data.nbytes * parts == leaf.nbytes
    put = jax.device_put(prepare(_experts(), sharding), named_shardings(_experts(), sharding))
    jax.tree.map(_same, put, placed)

    asked = []

    def read(start, stop):
        asked.append((start, stop))
        return jax.tree.map(lambda leaf: leaf[start:stop], _experts())

    for one in (sharding, ExpertSharding(_mesh(), ("expert", "data"))):
        asked.clear()
        jax.tree.map(_same, place_experts(read, E, one), place(_experts(), one))
        assert asked == [(i * E // one.ep_size, (i + 1) * E // one.ep_size) for i in range(one.ep_size)]


def check_refusals():
    mesh, experts = _mesh(), _experts()
    x, weights, ids, _ = _tokens()
    eight = _mesh(AxisType.Auto, (8,), ("all",))
    three = jax.sharding.Mesh(np.asarray(jax.devices()[:3]), ("three",))

    def call(sharding, given=experts):
        return lambda: w4a8.fused_experts(x, weights, ids, given, sharding=sharding)

    rows = LinearSharding(mesh, in_axis=("data", "tensor"))
    for action, error, message in [
        (call(ExpertSharding(three, "three")), ValueError, "E = 8 experts can't be split over ep_size = 3"),
        (
            lambda: place(experts, ExpertSharding(eight, None, "all")),
            ValueError,
            "intermediate_size / tp_size = 16 must be a multiple of the group size, got g = 32",
        ),
        (
            lambda: place(_experts(-1, 96), ExpertSharding(_mesh(), None, ("data", "expert"))),
            ValueError,
            "intermediate_size / tp_size = 24 must be a multiple of 16 channels",
        ),
        (call(ExpertSharding(mesh, tensor_axis="tensor")), ValueError, "aren't prepared for slices"),
        (call(LinearSharding(mesh)), TypeError, "sharding must be an ExpertSharding or None"),
        (lambda: ExpertSharding(mesh, "pipeline"), ValueError, "none named 'pipeline'"),
        (lambda: ExpertSharding(mesh, "data", tokens="data"), ValueError, "'data' is used for more than one"),
        (lambda: ExpertSharding(8, "data"), TypeError, "mesh must be a jax.sharding.Mesh, got int"),
        (call(ExpertSharding(mesh, tokens=P(None, "data"))), ValueError, "splits more leading axes than x"),
        (lambda: place(_dense(), ExpertSharding(mesh)), TypeError, "ExpertSharding is for ExpertWeights"),
        (lambda: place(experts, mesh), TypeError, "sharding must be an ExpertSharding or a LinearSharding"),
        (
            lambda: place(_dense(), LinearSharding(eight, out_axis="all")),
            ValueError,
            "out_features / out_size = 12 must be a multiple of 16 channels",
        ),
        (
            lambda: w4a8.linear(x, _dense(), sharding=rows),
            ValueError,
            "in_features / in_size = 16 must be a multiple of the group size, got g = 32",
        ),
        (lambda: w4a8.linear(x, _dense(), sharding=ExpertSharding(mesh)), TypeError, "must be a LinearShard"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            action()
    prepared = prepare(experts, ExpertSharding(mesh, tensor_axis="tensor"))
    with pytest.raises(ValueError, match=r"w2\.scaled_sum must have shape"):
        w4a8.fused_experts(x, weights, ids, prepared)


def check_gradients_cross_shard_map():
    """With respect to router weights; slot by slot it comes from the INT8 slots (docs/transforms.md)."""
    x, weights, ids, _ = _tokens()

    def loss_of_slots(weights, experts):
        slots = w4a8.apply_experts(x, ids, experts, backend="xla")
        return (w4a8.combine(slots, weights, dtype=x.dtype, backend="xla") * jnp.arange(H)).sum()

    def loss(weights, experts, sharding=None):
        y = w4a8.fused_experts(x, weights, ids, experts, backend="xla", sharding=sharding)
        return (y * jnp.arange(H)).sum()

    expected = {
        False: jax.grad(loss)(weights, _experts()),
        True: jax.grad(loss_of_slots)(weights, _experts()),
    }
    for kind, bitwise in itertools.product(KINDS, (False, True)):
        sharding = ExpertSharding(_mesh(kind), "expert", tokens="data", bitwise=bitwise)
        placed = place(_experts(), sharding)
        found = jax.jit(jax.grad(loss), static_argnums=2)(weights, placed, sharding)
        np.testing.assert_allclose(found, expected[bitwise], rtol=1e-4, atol=1e-4)


def check_vmap_scan_and_cond():
    x, weights, ids, _ = _tokens()
    sharding = ExpertSharding(_mesh(), "expert", bitwise=True)
    placed = place(_experts(), sharding)
    call = functools.partial(w4a8.fused_experts, sharding=sharding)
    many = np.stack([x, 2 * x, -x])
    mapped = jax.vmap(call, (0, None, None, None))(many, weights, ids, placed)
    _, scanned = jax.jit(lambda m, e: lax.scan(lambda c, x: (c, call(x, weights, ids, e)), 0, m))(
        many, placed
    )
    for one, found, again in zip(many, mapped, scanned, strict=True):
        _same(found, w4a8.fused_experts(one, weights, ids, _experts()))
        _same(again, found)
    branch = jax.jit(lambda p, e: lax.cond(p, lambda: call(x, weights, ids, e), lambda: jnp.asarray(x)))
    _same(branch(True, placed), w4a8.fused_experts(x, weights, ids, _experts()))
    _same(branch(False, placed), x)


def check_own_shard_map():
    """A user's shard_map: x the same everywhere, weights not; nothing is rerouted inside."""
    x, weights, ids, _ = _tokens()
    for kind, backend in CASES:
        mesh = _mesh(kind, (2,), ("expert",))
        placed = place(_experts(), ExpertSharding(mesh, "expert"))

        def body(x, weights, ids, experts, backend=backend):
            own = ids - lax.axis_index("expert") * (E // 2)
            own = jnp.where((own >= 0) & (own < E // 2), own, -1)
            return lax.psum(w4a8.fused_experts(x, weights, own, experts, backend=backend), "expert")

        spread = jax.shard_map(body, mesh=mesh, in_specs=(P(), P(), P(), P("expert")), out_specs=P())
        replicated = [jax.device_put(a, NamedSharding(mesh, P())) for a in (x, weights, ids)]
        found = jax.jit(spread)(*replicated, placed)
        told = ExpertSharding(mesh, "expert")
        _same(found, w4a8.fused_experts(x, weights, ids, placed, sharding=told, backend=backend))


def check_one_compilation_per_shape():
    x, weights, ids, _ = _tokens()
    sharding = ExpertSharding(_mesh(), "expert")
    placed = place(_experts(), sharding)
    layer = jax.jit(functools.partial(w4a8.fused_experts, sharding=sharding))
    for tokens in (4, 4, 8, 8):
        layer(x[:tokens], weights[:tokens], ids[:tokens], placed)
    assert layer._cache_size() == 2


def check_models():
    from jax_w4a8.models import load_model

    from .checkpoints import DATA

    path = DATA / "qwen3_moe-channel-int"
    ids = np.array([[1, 2, 3, 4], [9, 8, 7, 6]])
    alone = load_model(path)
    expected, text = alone(ids), alone.generate(ids, 6)
    for kind in KINDS:
        model = load_model(path, sharding=ExpertSharding(_mesh(kind), ("data", "expert"), bitwise=True))
        _same(model(ids), expected)
        _same(model.generate(ids, 6), text)
    batched = ExpertSharding(_mesh(), "expert", tokens="data")
    model = load_model(path, sharding=batched)
    logits = model(ids)
    assert logits.sharding.spec[0] == "data"
    assert np.abs(np.asarray(logits - expected)).max() < 0.02 * np.abs(np.asarray(expected)).max()
    with pytest.raises(ValueError, match="which don't divide its size, 1"):
        model(ids[:1])
    three = jax.sharding.Mesh(np.asarray(jax.devices()[:3]), ("three",))
    with pytest.raises((ValueError, NotImplementedError), match="can't be split over ep_size = 3"):
        load_model(path, sharding=ExpertSharding(three, "three"))


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}


def _run(check):
    start = time.perf_counter()
    try:
        check()
    except Exception:
        return traceback.format_exc()
    finally:
        print(f"{time.perf_counter() - start:6.2f} s {check.__name__}", file=sys.stderr)
    return None


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(CHECKS)
    print(json.dumps({name: _run(CHECKS[name]) for name in chosen}))
