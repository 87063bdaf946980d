"""Flax NNX modules: what they hold, what trains, what is copied, what is saved."""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_w4a8 as w4a8
from tests.reference import assert_same_bits, random_layer

nnx = pytest.importorskip("flax.nnx")

from jax_w4a8 import nnx as w4a8_nnx  # noqa: E402
from jax_w4a8.blocks import MoEWeights  # noqa: E402
from jax_w4a8.checkpoint import CheckpointError, read_linear, read_moe  # noqa: E402
from jax_w4a8.models import default_model_path, load_model  # noqa: E402
from jax_w4a8.models.span import Span  # noqa: E402
from jax_w4a8.nnx import (  # noqa: E402
    FloatMoE,
    PackedWeight,
    W4A8Linear,
    W4A8MoE,
    W4A8Options,
    quantize_model,
)

E, H, I = 4, 64, 96  # noqa: E741
ROUTING = w4a8.Routing(top_k=2)
call = jax.jit(lambda module, x: module(x))


def _x(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def _moe(seed=0, **options):
    return W4A8MoE(
        E, H, I, ROUTING, group_size=32, shared_intermediate_size=64, rngs=nnx.Rngs(seed), **options
    )


# --- What they compute.


def test_linear_is_the_functional_layer_bit_for_bit():
    weight, bias = _x(48, H, seed=1), _x(48, seed=2)
    codes = w4a8.quantize(weight, 32)
    expected = jax.jit(w4a8.linear)(_x(5, H), w4a8.pack_linear(codes, bias))
    packed = W4A8Linear.from_packed(w4a8.pack_linear(codes, bias))
    for layer in (
        W4A8Linear.from_float(weight, bias, group_size=32),
        W4A8Linear.from_codes(codes, bias),
        packed,
    ):
        assert_same_bits(call(layer, _x(5, H)), expected)
    assert packed.bias is None
    assert call(packed, _x(5, H, dtype=jnp.bfloat16)).dtype == jnp.bfloat16


def test_moe_is_the_functional_layer_with_shared_experts_added():
    layer = random_layer(experts=E, hidden=H, inner=I)
    shared = random_layer(seed=1, experts=1, hidden=H, inner=32)
    packed = w4a8.pack_experts(*map(_on_device, (layer.w13, layer.w2)))
    one = w4a8.pack_experts(*map(_on_device, (shared.w13, shared.w2)))
    router, correction = _x(H, E, seed=3), _x(E, seed=4)
    routing = w4a8.Routing(top_k=2, scoring="sigmoid", routed_scaling_factor=2.5)
    weights = MoEWeights(router, packed, None, correction, one, _x(H, seed=5))
    module = W4A8MoE.from_weights(weights, routing)
    x = _x(3, 5, H)

    @jax.jit
    def expected(x, weights):
        logits = jnp.matmul(x, weights.router, precision="highest")
        routed = w4a8.moe(x, logits, weights.experts, routing, correction_bias=weights.correction_bias)
        gate = jax.nn.sigmoid(jnp.matmul(x, weights.shared_gate[:, None], precision="highest"))
        ids = jnp.zeros((3, 5, 1), jnp.int32)
        return routed + w4a8.fused_experts(x, gate, ids, weights.shared)

    assert_same_bits(call(module, x), expected(x, weights))
    plain = W4A8MoE.from_codes(
        *map(_on_device, (layer.w13, layer.w2)), router, routing, correction_bias=correction
    )
    assert_same_bits(
        call(plain, x),
        call(W4A8MoE.from_weights(dataclasses.replace(weights, shared=None, shared_gate=None), routing), x),
    )


def test_moe_from_floats_with_every_part():
    """From floats, from codes and by a swap: biases and shared experts are those packed by hand."""
    w13, w2, shared = _x(E, 2 * I, H), _x(E, H, I, seed=1), (_x(80, H, seed=2), _x(H, 40, seed=3))
    router, rest = _x(H, E, seed=4), {"router_bias": _x(E, seed=5), "correction_bias": _x(E, seed=6)}
    biases, gate = {"w13_bias": _x(E, 2 * I, seed=7), "w2_bias": _x(E, H, seed=8)}, _x(H, seed=9)
    codes = [w4a8.quantize(w, 32) for w in (w13, w2, *shared)]
    one = w4a8.pack_experts(*(jax.tree.map(lambda leaf: leaf[None], w) for w in codes[2:]))
    experts = w4a8.pack_experts(*codes[:2], **biases)
    expected = MoEWeights(router, experts, rest["router_bias"], rest["correction_bias"], one, gate)
    rest |= {**biases, "shared_gate": gate}
    described = FloatMoE(
        *(w13[:, :I], w13[:, I:], w2, router, ROUTING, rest["router_bias"], rest["correction_bias"]),
        *(biases["w13_bias"][:, :I], biases["w13_bias"][:, I:], biases["w2_bias"]),
        shared=(shared[0][:40], shared[0][40:], shared[1]),
        shared_gate=gate,
    )
    model, options = nnx.Dict(moe=TinyMoE(nnx.Rngs(0))), {"*": W4A8Options(group_size=32)}
    for module in (
        W4A8MoE.from_float(w13, w2, router, ROUTING, group_size=32, shared=shared, **rest),
        W4A8MoE.from_codes(*codes[:2], router, ROUTING, shared=tuple(codes[2:]), **rest),
        quantize_model(model, options, moe={TinyMoE: lambda moe: described})[0].moe,
    ):
        jax.tree.map(assert_same_bits, module.weights(), expected)
    half = dataclasses.replace(described, up_bias=None)
    with pytest.raises(ValueError, match="gate_bias and up_bias must be given both or neither"):
        quantize_model(model, options, moe={TinyMoE: lambda moe: half})


def _on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def test_dtype_is_that_of_the_input_unless_given():
    x = _x(2, H, dtype=jnp.bfloat16)
    assert call(_moe(), x).dtype == jnp.bfloat16
    assert call(_moe(dtype=jnp.float32), x).dtype == jnp.float32


def test_stacked_layers_go_through_nnx_scan():
    @nnx.vmap
    def make(key):
        return W4A8Linear(H, H, group_size=32, rngs=nnx.Rngs(key))

    stack = make(jax.random.split(jax.random.key(0), 3))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    x = _x(2, H)
    expected = x
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], stack.weight.get_value())
        expected = call(W4A8Linear.from_packed(one), expected)
    np.testing.assert_allclose(run(x, stack), expected, rtol=1e-5, atol=1e-6)


# --- What trains.


def test_optimisers_and_gradients_pass_packed_weights_by():
    module = _moe()
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
    assert names == {"router"}
    x, target = _x(16, H), _x(16, H, seed=1)
    before = jax.tree.map(np.asarray, module.weights())

    @nnx.jit(graph_updates=True)
    def step(module, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(module)
        optimizer.update(module, gradients)
        return loss, gradients

    losses = []
    for _ in range(5):
        loss, gradients = step(module, optimizer)
        losses.append(float(loss))
    assert set(gradients) == {"router"}
    assert float(jnp.abs(gradients["router"].get_value()).max()) > 0
    assert losses[-1] < losses[0]
    after = module.weights()
    assert not np.array_equal(before.router, after.router)
    jax.tree.map(assert_same_bits, (before.experts, before.shared), (after.experts, after.shared))


def test_a_linear_layers_bias_and_input_have_gradients():
    layer = W4A8Linear(H, 40, group_size=32, rngs=nnx.Rngs(0))
    x = _x(6, H)
    gradients = nnx.grad(lambda layer: layer(x).sum())(layer)
    np.testing.assert_allclose(gradients["bias"].get_value(), np.full(40, 6.0), rtol=1e-6)
    assert "weight" not in gradients
    dx = jax.jit(jax.grad(lambda x, layer: layer(x).sum()))(x, layer)
    weight = w4a8.unpack_linear(layer.weight.get_value())[0].dequantize()
    np.testing.assert_allclose(dx, jnp.broadcast_to(weight.sum(0), x.shape), rtol=1e-4, atol=1e-4)


# --- What is copied.


def test_jit_of_a_module_does_not_copy_its_weights():
    """64 MB of weights of which a call reads a 32nd, beside nnx.jit, which returns every Variable."""
    module = W4A8MoE(64, 1024, 560, ROUTING, group_size=32, rngs=nnx.Rngs(0))
    packed = module.experts.get_value()
    assert packed.nbytes > 60e6
    x = _x(1, 1024)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(packed)]
    plain, copying = call, nnx.jit(lambda module, x: module(x))
    sparing = nnx.jit(lambda module, x: module(x), graph_updates=False)

    sizes = plain.lower(module, x).compile().memory_analysis()
    assert sizes.output_size_in_bytes <= 2 * x.nbytes
    assert sizes.temp_size_in_bytes < 1e6
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(module.experts.get_value())]
    assert after == pointers

    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
    before = np.asarray(module.router.get_value())
    _train_step(module, optimizer, x)
    assert not np.array_equal(before, module.router.get_value())
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(module.experts.get_value())]
    assert after == pointers

    alone, spared, copied = (_best_time(f, module, x) for f in (plain, sparing, copying))
    assert alone < copied / 4, (alone, copied)
    assert spared < copied / 4, (spared, copied)


@functools.partial(nnx.jit, graph_updates=False)
def _train_step(module, optimizer, x):
    gradients = nnx.grad(lambda module: (module(x) ** 2).sum())(module)
    optimizer.update(module, gradients)


def _best_time(function, *arguments):
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def test_split_and_merge_inside_jit_keep_weights_arguments():
    module = _moe()
    graph, state = nnx.split(module)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    assert_same_bits(run(state, _x(4, H)), call(module, _x(4, H)))
    assert len(run.lower(state, _x(4, H)).as_text()) < 100_000


# --- What is saved.


def test_orbax_restores_into_an_abstract_model(tmp_path):
    module = _moe(seed=3)
    w4a8_nnx.save(tmp_path / "saved", module)
    abstract = nnx.eval_shape(_moe)
    leaves = jax.tree.leaves(abstract)
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    restored = w4a8_nnx.restore(tmp_path / "saved", abstract)
    assert isinstance(restored.experts, PackedWeight)
    jax.tree.map(assert_same_bits, module.weights(), restored.weights())
    assert_same_bits(call(restored, _x(4, H)), call(module, _x(4, H)))


def test_restore_refuses_another_layout_and_other_sizes(tmp_path, monkeypatch):
    module = W4A8Linear(H, 40, group_size=32, rngs=nnx.Rngs(0))
    w4a8_nnx.save(tmp_path / "saved", module)
    other = nnx.eval_shape(lambda: W4A8Linear(H - 2, 40, group_size=32, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"packed weights of 'weight' were saved with .*'in_features': 64"):
        w4a8_nnx.restore(tmp_path / "saved", other)
    with pytest.raises(ValueError, match="only one of what was saved and the model"):
        w4a8_nnx.restore(tmp_path / "saved", nnx.eval_shape(_moe))
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        w4a8_nnx.restore(tmp_path / "nowhere", module)
    monkeypatch.setattr("jax_w4a8.nnx.saving.LAYOUT_VERSION", 99)
    with pytest.raises(ValueError, match="saved in layout version 1, this jax_w4a8 has version 99"):
        w4a8_nnx.restore(tmp_path / "saved", module)


def test_plain_orbax_takes_the_state_as_it_is(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    module = _moe(seed=3)
    graph, state = nnx.split(module)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", nnx.state(nnx.eval_shape(_moe)))
    assert_same_bits(call(nnx.merge(graph, restored), _x(4, H)), call(module, _x(4, H)))


# --- Single layers of a checkpoint.


@pytest.fixture(scope="module")
def stored_model():
    return load_model(default_model_path())


def test_layers_of_a_checkpoint_are_those_of_its_model(stored_model):
    path, layer = default_model_path(), stored_model.layers[0]
    x = _x(2, 3, stored_model.config.hidden_size)
    query = W4A8Linear.from_packed(read_linear(path, "model.layers.0.self_attn.q_proj"))
    assert_same_bits(call(query, x), call(layer.attention.query, x))
    weights = read_moe(path, "model.layers.0.mlp")
    module = W4A8MoE.from_weights(weights, layer.mlp.routing)
    jax.tree.map(assert_same_bits, weights.experts, layer.mlp.experts.get_value())
    span = Span(jnp.zeros(2, jnp.int32), jnp.full(2, 3, jnp.int32), 3)
    expected = jax.jit(lambda mlp, x: mlp(x, span))(layer.mlp, x)
    np.testing.assert_allclose(call(module, x), expected, rtol=1e-5, atol=1e-6)


def test_a_missing_layer_is_named():
    path = default_model_path()
    with pytest.raises(CheckpointError, match=r"no module 'model.layers.99.self_attn.q_proj'; of that kind"):
        read_linear(path, "model.layers.99.self_attn.q_proj")
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.gate' is in floating point"):
        read_linear(path, "model.layers.0.mlp.gate")
    with pytest.raises(CheckpointError, match=r"no experts 'model.layers.0.moe.experts.0'"):
        read_moe(path, "model.layers.0.moe")


# --- Swapping a model's own layers.


class TinyMoE(nnx.Module):
    """A user's own: dense over experts, names of its own."""

    def __init__(self, rngs):
        self.router = nnx.Linear(H, E, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        self.wi_0 = nnx.Param(init(rngs.params(), (E, H, I)))
        self.wi_1 = nnx.Param(init(rngs.params(), (E, H, I)))
        self.wo = nnx.Param(init(rngs.params(), (E, I, H)))

    def __call__(self, x):
        weights, ids = w4a8.route(self.router(x), ROUTING)
        inner = jax.nn.silu(jnp.einsum("th,ehi->tei", x, self.wi_0[...]))
        inner = inner * jnp.einsum("th,ehi->tei", x, self.wi_1[...])
        outputs = jnp.einsum("tei,eih->teh", inner, self.wo[...])
        chosen = jnp.take_along_axis(outputs, ids[..., None], axis=1)
        return jnp.einsum("tkh,tk->th", chosen, weights)


def _describe(moe):
    return FloatMoE(
        gate=moe.wi_0[...].mT,
        up=moe.wi_1[...].mT,
        down=moe.wo[...].mT,
        router=moe.router.kernel,
        routing=ROUTING,
    )


class TinyModel(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(H, H, rngs=rngs)
        self.blocks = nnx.List(
            [nnx.Dict(mlp=TinyMoE(rngs), out=nnx.Linear(H, H, rngs=rngs)) for _ in range(2)]
        )
        self.tied = self.inner
        self.head = nnx.Linear(H, 8, dtype=jnp.bfloat16, rngs=rngs)
        self.odd = nnx.Linear(H, 8, dot_general=lambda *a, **k: jax.lax.dot_general(*a, **k), rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = x + block.out(block.mlp(self.inner(x)))
        return self.head(self.tied(x))


@pytest.fixture(scope="module")
def float_model():
    return TinyModel(nnx.Rngs(0))


RULES = {
    "blocks.1.out": None,
    re.compile(r"blocks\.\d\.(mlp|out)"): W4A8Options(group_size=32),
    "blocks.*": W4A8Options(group_size=64),
    "*": W4A8Options(group_size=-1, activation_scheme="symmetric"),
}


def test_quantize_model_swaps_by_rules(float_model):
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(float_model)))
    rules = {key: value for key, value in RULES.items() if key != "blocks.*"}
    model, report = quantize_model(float_model, rules, moe={TinyMoE: _describe})
    swapped = {entry.path: entry for entry in report.swapped}
    assert set(swapped) == {"inner = tied", "blocks.0.mlp", "blocks.0.out", "blocks.1.mlp", "head"}
    assert {entry.path: entry.reason for entry in report.kept} == {
        "blocks.1.out": "rule 'blocks.1.out' says so",
        "odd": "it has a dot_general of its own",
    }
    assert swapped["blocks.0.mlp"].shape == (E, H, I)
    assert swapped["blocks.0.mlp"].group_size == 32
    assert swapped["inner = tied"].group_size == -1
    assert 0.01 < swapped["head"].error < 0.15
    assert swapped["blocks.0.mlp"].bytes_after < swapped["blocks.0.mlp"].bytes_before / 5
    assert isinstance(model.blocks[0].mlp, W4A8MoE)
    assert isinstance(model.inner, W4A8Linear)
    assert model.inner is model.tied
    assert model.inner.activation_scheme == "symmetric"
    text = str(report)
    assert "5 of 7 layers swapped" in text
    assert "kept, it has a dot_general of its own" in text

    # The original is as it was, and shares what both hold.
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(float_model)))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert type(float_model.inner) is nnx.Linear
    x = _x(32, H)
    expected, found = call(float_model, x), call(model, x)
    assert found.dtype == expected.dtype == jnp.bfloat16
    difference = np.asarray(found, np.float32) - np.asarray(expected, np.float32)
    assert 0 < np.linalg.norm(difference) < 0.25 * np.linalg.norm(np.asarray(expected, np.float32))


def test_quantize_model_in_place_and_in_the_abstract():
    model = TinyModel(nnx.Rngs(0))
    copy, _ = quantize_model(model, moe={TinyMoE: _describe})
    result, _ = quantize_model(model, moe={TinyMoE: _describe}, in_place=True)
    assert result is model
    assert isinstance(model.blocks[1].mlp, W4A8MoE)
    assert isinstance(model.blocks[1].out, W4A8Linear)
    abstract = nnx.eval_shape(lambda: quantize_model(TinyModel(nnx.Rngs(0)), moe={TinyMoE: _describe})[0])
    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(copy)))
    found = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), nnx.to_pure_dict(nnx.state(abstract)))
    assert found == expected


def test_a_model_that_is_one_layer():
    layer = nnx.Linear(H, 8, rngs=nnx.Rngs(0))
    quantized, report = quantize_model(layer)
    assert isinstance(quantized, W4A8Linear)
    assert len(report.swapped) == 1
    np.testing.assert_allclose(call(quantized, _x(4, H)), layer(_x(4, H)), atol=0.5)
    with pytest.raises(ValueError, match="in_place can't swap the model itself"):
        quantize_model(layer, in_place=True)


def test_unmatched_and_misused_rules(float_model):
    with pytest.raises(
        ValueError, match=r"rules \['layers.\*'\] match none of the layers \['blocks.0.mlp.router'"
    ):
        quantize_model(float_model, {"layers.*": W4A8Options()})
    with pytest.raises(TypeError, match=r"rule '\*' must give W4A8Options or None, got 4"):
        quantize_model(float_model, {"*": 4})
    with pytest.raises(TypeError, match="must be a glob or a compiled pattern, got 3"):
        quantize_model(float_model, {3: None})
    with pytest.raises(TypeError, match=r"moe\[TinyMoE\] must return a FloatMoE, got int"):
        quantize_model(float_model, moe={TinyMoE: lambda moe: 3})
    with pytest.raises(TypeError, match=r"model must be an nnx\.Module, got dict"):
        quantize_model({})
    with pytest.raises(ValueError, match="group_size must be") as raised:
        quantize_model(float_model, {"*": W4A8Options(group_size=33)})
    assert "while swapping layer 'blocks.0.mlp.router'" in raised.value.__notes__


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: W4A8Linear(H, 8), ValueError, "rngs must be given where weight is None"),
        (lambda: W4A8Linear(H, 8, weight=jnp.zeros((8, H))), TypeError, "weight must be LinearWeights"),
        (lambda: W4A8Linear.from_packed(jnp.zeros((8, H))), TypeError, "weight must be LinearWeights"),
        (
            lambda: W4A8Linear(H, 8, weight=w4a8.pack_linear(w4a8.quantize(jnp.ones((9, H)), 32))),
            ValueError,
            "weight must map 64 features to 8, it maps 64 to 9",
        ),
        (
            lambda: W4A8Linear.from_float(jnp.ones((8, H)), jnp.ones(9)),
            ValueError,
            r"bias must have shape \(8,\), got \(9,\)",
        ),
        (lambda: W4A8Linear(H, 8, backend="gpu", rngs=nnx.Rngs(0)), ValueError, "backend must be one of"),
        (lambda: W4A8MoE(E, H, I, "top2", rngs=nnx.Rngs(0)), TypeError, "routing must be a Routing"),
        (lambda: W4A8MoE(1, H, I, ROUTING, rngs=nnx.Rngs(0)), ValueError, "top_k"),
        (
            lambda: W4A8MoE.from_float(
                jnp.ones((E, 2 * I, H)), jnp.ones((E, H, I)), jnp.ones((E, H)), ROUTING, group_size=32
            ),
            ValueError,
            r"router must have shape \(64, 4\), got \(4, 64\)",
        ),
        (
            lambda: W4A8MoE.from_codes(
                *(w4a8.quantize(jnp.ones(shape), 32) for shape in ((E, 2 * I, H), (E, H, I))),
                jnp.ones((H, E)),
                ROUTING,
                shared=(jnp.ones((80, H)), jnp.ones((H, 40))),
            ),
            TypeError,
            "shared must be codes of w13 and w2, got",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()
