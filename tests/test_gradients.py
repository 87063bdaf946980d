"""Reverse mode: the straight-through rule against the float model, memory, and what is refused."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from tests import reference

needs_native = pytest.mark.skipif(not w4a8.native_available(), reason="needs the native extension")
BACKENDS = ["xla", pytest.param("cpu_int4", marks=needs_native)]
E, H, I, K, T = 4, 64, 40, 2, 7  # noqa: E741


@functools.cache
def _layer(group_size: int = 32, scale_dtype=np.float32) -> reference.Layer:
    return reference.random_layer(
        experts=E, hidden=H, inner=I, group_size=group_size, scale_dtype=scale_dtype, biased=True
    )


def _batch(**sizes) -> reference.Batch:
    return reference.random_batch(tokens=T, hidden=H, experts=E, **sizes)


def _with_parts(layer: reference.Layer, name: str, change: np.ndarray) -> reference.Layer:
    """``change`` added to a bias, or to the scales of a projection."""
    if name.endswith("bias"):
        return layer._replace(**{name: getattr(layer, name).astype(np.float64) + change})
    tensor = getattr(layer, name)
    scale = np.asarray(tensor.scale, np.float64) + change
    return layer._replace(**{name: w4a8.QuantizedTensor(tensor.codes, scale, tensor.group_size)})


def _difference(function, direction: np.ndarray, step: float = 1e-5) -> float:
    """The derivative along ``direction`` by central differences, float64."""
    return (function(step * direction) - function(-step * direction)) / (2 * step)


def _packed_scale(gradient: np.ndarray, channels: int) -> np.ndarray:
    """``[E, NB, G, 16]`` as ``[E, N, G]``."""
    moved = np.swapaxes(np.asarray(gradient, np.float64), -1, -2)
    return moved.reshape(E, -1, moved.shape[-1])[:, :channels]


def _separated(x: np.ndarray) -> np.ndarray:
    """Gate and up out of alternating blocks: ``[E, blocks * 32, ...]`` to ``[E, 2I, ...]``."""
    pairs = x.reshape(E, -1, 2, 16, *x.shape[2:])
    sides = [pairs[:, :, side].reshape(E, -1, *x.shape[2:])[:, :I] for side in (0, 1)]
    return np.concatenate(sides, axis=1)


@pytest.mark.parametrize(
    ("activation", "group_size", "k", "on_input", "backend"),
    [
        ("silu", 32, 2, False, "xla"),
        ("silu", 32, 2, False, "auto"),
        ("silu", -1, 1, True, "auto"),
        ("swigluoai", -1, 2, False, "auto"),
        ("gelu", 32, 2, False, "auto"),
    ],
)
def test_equals_finite_differences_of_the_float_model(activation, group_size, k, on_input, backend):
    layer, batch = _layer(group_size), _batch(top_k=k)
    rng = np.random.default_rng(7)
    cotangent = rng.normal(size=batch.x.shape)

    def loss(x, weights, experts):
        y = w4a8.fused_experts(
            x,
            weights,
            batch.ids,
            experts,
            activation=activation,
            apply_router_weight_on_input=on_input,
            backend=backend,
        )
        return (y * jnp.asarray(cotangent, jnp.float32)).sum()

    in_x, in_weights, in_experts = jax.jit(jax.grad(loss, (0, 1, 2), allow_int=True))(
        *batch[:2], layer.packed()
    )
    found = {
        "x": in_x,
        "weights": in_weights,
        "w13_bias": _separated(np.asarray(in_experts.w13.bias).reshape(E, -1)),
        "w2_bias": np.asarray(in_experts.w2.bias).reshape(E, -1)[:, :H],
        "w13": _separated(_packed_scale(in_experts.w13.scale, 96)),
        "w2": _packed_scale(in_experts.w2.scale, H),
    }
    assert in_experts.w13.codes.dtype == in_experts.w2.codes.dtype == jax.dtypes.float0
    for side in (in_experts.w13, in_experts.w2):
        assert not np.any(side.scaled_sum)

    x, weights = batch.x.astype(np.float64), batch.weights.astype(np.float64)

    def model(x=x, weights=weights, layer=layer):
        y = reference.unquantized_experts(x, weights, batch.ids, layer, activation, on_input)
        return float((y * cotangent).sum())

    changes = {
        "x": lambda change: model(x=x + change),
        "weights": lambda change: model(weights=weights + change),
        **{
            name: functools.partial(lambda name, change: model(layer=_with_parts(layer, name, change)), name)
            for name in ("w13_bias", "w2_bias", "w13", "w2")
        },
    }
    for name, gradient in found.items():
        direction = rng.normal(size=gradient.shape)
        if name in ("w13", "w2"):
            direction *= np.abs(np.asarray(getattr(layer, name).scale)).mean()
        expected = _difference(changes[name], direction)
        got = float((np.asarray(gradient, np.float64) * direction).sum())
        length = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs(got - expected) < 2e-6 * length, name


def _gradients(backend: str, dtype: str, group_size: int):
    """Of ``moe`` (sigmoid routing with a correction bias) with respect to everything."""
    layer = _layer(group_size, jnp.bfloat16)
    batch = _batch(dtype=dtype)
    logits = np.random.default_rng(3).normal(size=(T, E)).astype(np.float32)
    routing = w4a8.Routing(K, scoring="sigmoid", routed_scaling_factor=1.5)

    def loss(x, logits, experts):
        y = w4a8.moe(
            x,
            logits,
            experts,
            routing,
            correction_bias=jnp.arange(E, dtype=jnp.float32) / 10,
            backend=backend,
        )
        return (y.astype(jnp.float32) * jnp.cos(jnp.arange(H))).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2), allow_int=True))(batch.x, logits, layer.packed())


@needs_native
@pytest.mark.parametrize(("dtype", "group_size"), [("float32", 32), ("bfloat16", -1)])
def test_backends_agree(dtype, group_size):
    native, pure = (jax.tree.leaves(_gradients(name, dtype, group_size)) for name in ("cpu_int4", "xla"))
    assert native[0].dtype == dtype
    compared = 0
    for a, b in zip(native, pure, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype != jax.dtypes.float0 and np.any(b):
            assert reference.relative_error(a, np.asarray(b).astype(np.float64)) < 1e-5
            compared += 1
    assert compared == 6  # x, logits, two biases, two scales


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_slots_and_combine(backend):
    layer, batch = _layer(), _batch()
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(T, H)), jnp.float32)
    experts = layer.packed()

    def fused(x, weights):
        return (w4a8.fused_experts(x, weights, batch.ids, experts, backend=backend) * cotangent).sum()

    def apart(x, weights):
        slots = w4a8.apply_experts(x, batch.ids, experts, backend=backend)
        return (w4a8.combine(slots, weights, backend=backend) * cotangent).sum()

    (x_fused, _), (x_apart, weights_apart) = (jax.grad(f, (0, 1))(*batch[:2]) for f in (fused, apart))
    np.testing.assert_allclose(x_apart, x_fused, rtol=1e-5, atol=1e-5)
    # The combine is exact in its weights: their gradient is the slots that it was given.
    slots = np.asarray(w4a8.apply_experts(batch.x, batch.ids, experts, backend=backend), np.float64)
    expected = (slots * np.asarray(cotangent, np.float64)[:, None]).sum(-1)
    np.testing.assert_allclose(weights_apart, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("channels", "inputs", "group_size"), [(40, 80, 32), (24, 64, -1)])
def test_linear(backend, channels, inputs, group_size, monkeypatch):
    # Small chunks: several of them, of which the last overlaps.
    monkeypatch.setattr("jax_w4a8.experts.backward._CHUNK_WEIGHTS", 2 * 16 * 96)
    rng = np.random.default_rng(1)
    tensor = reference.random_weights(rng, (channels, inputs), group_size)
    bias = rng.normal(size=channels).astype(np.float32)
    x = rng.normal(size=(3, 2, inputs)).astype(np.float32)
    cotangent = rng.normal(size=(3, 2, channels)).astype(np.float32)

    def loss(x, weights):
        return (w4a8.linear(x, weights, backend=backend) * cotangent).sum()

    packed = reference.on_device(w4a8.pack_linear(tensor, bias))
    in_x, in_weights = jax.grad(loss, (0, 1), allow_int=True)(x, packed)
    rows, out = x.reshape(-1, inputs).astype(np.float64), cotangent.reshape(-1, channels).astype(np.float64)
    assert reference.relative_error(in_x, (out @ reference.dequantized(tensor)).reshape(x.shape)) < 1e-5
    np.testing.assert_allclose(in_weights.bias.reshape(-1)[:channels], out.sum(0), rtol=1e-5)
    width = inputs if group_size == -1 else group_size
    products = (out.T @ rows) * np.asarray(tensor.codes, np.float64)
    expected = np.add.reduceat(products, range(0, inputs, width), axis=1)
    scale = np.swapaxes(in_weights.scale, -1, -2).reshape(-1, expected.shape[1])[:channels]
    assert reference.relative_error(scale, expected) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_missing_and_wrong_experts(backend):
    """Id -1 has no gradient; empty experts have none; a wrong id's gradient is NaN, its row alone."""
    batch, experts = _batch(), _layer().packed()
    ids = np.where(batch.ids == 3, 0, batch.ids)
    ids[2] = [-1, 1]
    ids[3] = -1

    def loss(x, weights, experts, ids):
        return w4a8.fused_experts(x, weights, ids, experts, backend=backend).sum()

    in_x, in_weights, in_experts = jax.grad(loss, (0, 1, 2), allow_int=True)(*batch[:2], experts, ids)
    assert in_weights[2, 0] == 0
    assert not np.any(in_weights[3])
    assert not np.any(in_x[3])
    assert np.any(in_x[2])
    assert not np.any(in_experts.w13.bias[3])
    assert np.any(in_experts.w13.bias[0])
    if backend == "xla":
        wrong = ids.copy()
        wrong[1, 1] = E
        damaged = jax.grad(loss)(*batch[:2], experts, wrong)
        assert bool(jnp.isnan(damaged[1]).all())
        np.testing.assert_array_equal(np.delete(damaged, 1, 0), np.delete(in_x, 1, 0))


def test_no_tokens():
    def loss(x, weights, experts):
        return w4a8.fused_experts(x, weights, jnp.zeros((0, K), jnp.int32), experts).sum()

    experts = _layer().packed()
    in_x, _, in_experts = jax.grad(loss, (0, 1, 2), allow_int=True)(
        jnp.zeros((0, H)), jnp.zeros((0, K)), experts
    )
    assert in_x.shape == (0, H)
    assert not np.any(in_experts.w2.bias)


def _abstract_layer(experts: int, hidden: int, inner: int) -> w4a8.ExpertWeights:
    def linear(channels: int, inputs: int) -> w4a8.LinearWeights:
        lead, groups = (experts, channels // 16), inputs // 64
        arrays = [
            ((*lead, groups, 512), np.uint8),
            ((*lead, groups, 16), jnp.bfloat16),
            ((*lead, 16), np.float32),
            ((*lead, 16), np.float32),
        ]
        return w4a8.LinearWeights(*(jax.ShapeDtypeStruct(*a) for a in arrays), channels, inputs, 64)

    return w4a8.ExpertWeights(linear(2 * inner, hidden), linear(hidden, inner))


@pytest.mark.parametrize(("scales", "experts_alive"), [(False, 2), (True, 3)])
def test_memory_is_bounded_by_two_experts(scales, experts_alive):
    """Temporary memory of a compiled gradient: no float weights of all experts, whatever their number."""
    hidden, inner, tokens = 512, 512, 16

    def loss(x, logits, floats, experts):
        experts = w4a8.with_trainable_parts(experts, floats)
        return (w4a8.moe(x, logits, experts, w4a8.Routing(K), backend="auto") ** 2).sum()

    used = {}
    for count in (4, 64):
        experts = _abstract_layer(count, hidden, inner)
        floats = {side: {"scale": getattr(experts, side).scale} if scales else {} for side in ("w13", "w2")}
        arguments = (
            jax.ShapeDtypeStruct((tokens, hidden), np.float32),
            jax.ShapeDtypeStruct((tokens, count), np.float32),
        )
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arguments, floats, experts).compile()
        used[count] = compiled.memory_analysis().temp_size_in_bytes
    one_expert = 4 * 3 * hidden * inner
    scale_arrays = 64 * 2 * 4 * (3 * hidden * inner // 64) if scales else 0  # their gradients, float32
    activations = 4 * tokens * K * (4 * hidden + 8 * inner) + (1 << 16)
    assert used[64] < experts_alive * one_expert + activations + scale_arrays, used
    assert used[64] - used[4] < one_expert / 2 + scale_arrays, used


def test_checkpoint_and_scan():
    batch, experts = _batch(), _layer().packed()

    def step(x, _):
        return x + w4a8.fused_experts(x, batch.weights, batch.ids, experts), None

    def loss(step, x):
        return (jax.lax.scan(step, x, length=3)[0] ** 2).sum()

    plain = jax.grad(functools.partial(loss, step))(batch.x)
    remat = jax.jit(jax.grad(functools.partial(loss, jax.checkpoint(step))))(batch.x)
    np.testing.assert_allclose(remat, plain, rtol=1e-5)

    def by_hand(x):
        for _ in range(3):
            x, _ = step(x, None)
        return (x**2).sum()

    np.testing.assert_allclose(jax.grad(by_hand)(batch.x), plain, rtol=1e-5)


def test_scan_keeps_one_copy_of_the_weights():
    experts = _abstract_layer(8, 256, 256)

    def loss(x, weights, ids, experts):
        def step(x, _):
            return x + w4a8.fused_experts(x, weights, ids, experts), None

        return (jax.lax.scan(step, x, length=32)[0] ** 2).sum()

    arguments = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((8, 256), np.float32), ((8, K), np.float32), ((8, K), np.int32))
    ]
    compiled = jax.jit(jax.grad(loss)).lower(*arguments, experts).compile()
    # 32 copies of the packed weights would be 27 MB.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 << 20


class TestVmap:
    """Batched gradients equal those of a loop."""

    def _loss(self, x, weights, ids, experts):
        return (w4a8.fused_experts(x, weights, ids, experts) ** 2).sum()

    def _stacked(self):
        batches = [_batch(seed=seed) for seed in (1, 2, 3)]
        return tuple(jnp.asarray(np.stack(parts)) for parts in zip(*batches, strict=True))

    @pytest.mark.parametrize("argnums", [(0, 1), (0, 1, 3)])
    def test_vmap_of_grad(self, argnums):
        gradient = jax.grad(self._loss, argnums, allow_int=True)
        stacked, experts = self._stacked(), _layer().packed()
        mapped = jax.vmap(gradient, (0, 0, 0, None))(*stacked, experts)
        for i in range(3):
            one = gradient(*(part[i] for part in stacked), experts)
            for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(one), strict=True):
                if b.dtype != jax.dtypes.float0:
                    np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-5)

    def test_grad_of_vmap(self):
        (x, weights, ids), experts = self._stacked(), _layer().packed()
        floats = w4a8.trainable_parts(experts, scales=True)

        def loss(floats, call):
            return call(x, weights, ids, w4a8.with_trainable_parts(experts, floats)).sum()

        mapped = jax.grad(loss)(floats, jax.vmap(self._loss, (0, 0, 0, None)))

        def loop(x, weights, ids, experts):
            return sum(self._loss(x[i], weights[i], ids[i], experts) for i in range(3))

        for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(jax.grad(loss)(floats, loop)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

    def test_sets_of_experts(self):
        batch = _batch()
        sets = [reference.random_layer(seed, E, H, I, biased=True).packed() for seed in (0, 1)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)

        def loss(x, experts):
            call = functools.partial(self._loss, x, batch.weights, batch.ids)
            return jax.vmap(call)(experts).sum()

        in_x = jax.grad(loss)(batch.x, stacked)
        expected = sum(jax.grad(self._loss)(*batch, one) for one in sets)
        np.testing.assert_allclose(in_x, expected, rtol=1e-5, atol=1e-5)

    def test_jacrev(self):
        batch, experts = _batch(), _layer().packed()
        call = functools.partial(
            w4a8.fused_experts, weights=batch.weights[:1], ids=batch.ids[:1], experts=experts
        )
        jacobian = jax.jacrev(call)(batch.x[:1])
        row = jax.grad(lambda x: call(x)[0, 5])(batch.x[:1])
        np.testing.assert_allclose(jacobian[0, 5], row, rtol=1e-5, atol=1e-6)


class TestTrainableParts:
    def test_the_same_scales_change_nothing(self):
        experts = _layer(scale_dtype=jnp.bfloat16).packed()
        parts = w4a8.trainable_parts(experts, scales=True)
        again = w4a8.with_trainable_parts(experts, parts)
        assert again.w13.scale.dtype == jnp.bfloat16
        for side in ("w13", "w2"):
            a, b = (getattr(e, side).scaled_sum for e in (again, experts))
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)

    def test_new_scales_equal_packing_them(self):
        layer, batch = _layer(), _batch()
        doubled = layer._replace(w2=dataclasses.replace(layer.w2, scale=layer.w2.scale * 2)).packed()
        parts = w4a8.trainable_parts(layer.packed(), biases=False, scales=True)
        parts["w2"]["scale"] = parts["w2"]["scale"] * 2
        changed = w4a8.with_trainable_parts(layer.packed(), parts)
        np.testing.assert_allclose(
            w4a8.fused_experts(*batch, changed), w4a8.fused_experts(*batch, doubled), rtol=1e-5, atol=1e-5
        )

    def test_bad_parts_are_named(self):
        experts = _layer().packed()
        with pytest.raises(ValueError, match=r"out of \['w13', 'w2'\], got \['w3'\]"):
            w4a8.with_trainable_parts(experts, {"w3": {}})
        with pytest.raises(ValueError, match=r"parts\['bias'\] must have shape \(4, 4, 16\), got \(3,\)"):
            w4a8.with_trainable_parts(experts, {"w2": {"bias": np.zeros(3)}})
        with pytest.raises(TypeError, match="got dict"):
            w4a8.trainable_parts({})


class TestRefusals:
    # D11
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
    @pytest.mark.parametrize("operation", ["fused_experts", "apply_experts", "combine", "linear", "moe"])
    def test_forward_mode(self, operation, wrap):
        batch, experts = _batch(), _layer().packed()
        dense = w4a8.pack_linear(reference.one(_layer().w2, 0))
        slots = jnp.zeros((T, K, H))
        call, x = {
            "fused_experts": (lambda x: w4a8.fused_experts(x, *batch[1:], experts), batch.x),
            "apply_experts": (lambda x: w4a8.apply_experts(x, batch.ids, experts), batch.x),
            "combine": (lambda x: w4a8.combine(x, batch.weights), slots),
            "linear": (lambda x: w4a8.linear(x, dense), jnp.zeros((T, I))),
            "moe": (lambda x: w4a8.moe(x, x[:, :E], experts, w4a8.Routing(K)), batch.x),
        }[operation]
        with pytest.raises(TypeError, match=r"no forward-mode derivative .* Use jax\.grad"):
            wrap(lambda x: jax.jvp(call, (x,), (x,)))(x)

    @pytest.mark.parametrize(
        "transform", [jax.jacfwd, jax.hessian, lambda f: jax.linearize(f, _batch().x)[1]]
    )
    def test_other_forward_mode_transforms(self, transform):
        batch, experts = _batch(), _layer().packed()

        def loss(x):
            return w4a8.fused_experts(x, *batch[1:], experts).sum()

        with pytest.raises(TypeError, match=r"no forward-mode derivative"):
            transform(loss)(batch.x)

    def test_second_derivatives(self):
        batch, experts = _batch(), _layer().packed()
        slope = jax.grad(lambda x: (w4a8.fused_experts(x, *batch[1:], experts) ** 2).sum())
        with pytest.raises(TypeError, match=r"first derivatives alone"):
            jax.grad(lambda x: slope(x).sum())(batch.x)


@needs_native
def test_gradients_inside_and_outside_shard_map():
    out = reference.in_process(
        check_shard_map, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu"
    )
    assert out.split() == ["done"] * 2, out


def check_shard_map() -> None:
    assert os.environ["XLA_FLAGS"]
    batch, experts = _batch(), _layer().packed()
    x, weights, ids = (jnp.asarray(part[:6]) for part in batch)
    by_token, everywhere = jax.sharding.PartitionSpec("i"), jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, weights, experts, call):
        return (call(x, weights, ids, experts) ** 2).sum()

    def local(x, weights, ids, experts, backend):
        return w4a8.fused_experts(x, weights, ids, experts, backend=backend)

    expected = jax.grad(loss, (0, 1, 2), allow_int=True)(x, weights, experts, w4a8.fused_experts)
    for backend, check_vma in (("cpu_int4", False), ("xla", True)):
        call = jax.shard_map(
            functools.partial(local, backend=backend),
            mesh=mesh,
            in_specs=(by_token, by_token, by_token, everywhere),
            out_specs=by_token,
            check_vma=check_vma,
        )
        found = jax.jit(jax.grad(functools.partial(loss, call=call), (0, 1, 2), allow_int=True))(
            x, weights, experts
        )
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if b.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        print("done")
