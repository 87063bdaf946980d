"""Flax Linen modules: the same bits as the functional layers, variables in their collections."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_w4a8 as w4a8
from tests.reference import assert_same_bits

linen = pytest.importorskip("flax.linen")

from flax import nnx, serialization  # noqa: E402

from jax_w4a8.blocks import MoEWeights, moe_block, random_experts  # noqa: E402
from jax_w4a8.linen import W4A8Linear, W4A8MoE, linear_variables, moe_variables  # noqa: E402
from jax_w4a8.nnx import W4A8MoE as NnxMoE  # noqa: E402

E, H, I = 4, 64, 96  # noqa: E741
ROUTING = w4a8.Routing(top_k=2)
MOE = W4A8MoE(
    E,
    I,
    ROUTING,
    group_size=32,
    shared_intermediate_size=40,
    use_router_bias=True,
    use_correction_bias=True,
    use_shared_gate=True,
)


def _x(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.fixture(scope="module")
def weights():
    keys = jax.random.split(jax.random.key(0), 2)
    return MoEWeights(
        router=_x(H, E, seed=1),
        experts=random_experts(keys[0], E, H, I, 32),
        router_bias=_x(E, seed=2),
        correction_bias=_x(E, seed=3),
        shared=random_experts(keys[1], 1, H, 40, 32),
        shared_gate=_x(H, seed=4),
    )


def test_init_puts_variables_in_their_collections():
    shapes = jax.eval_shape(MOE.init, jax.random.key(0), _x(2, H))
    assert set(shapes) == {"params", "w4a8"}
    assert {k: v.shape for k, v in shapes["params"].items()} == {
        "router": (H, E),
        "router_bias": (E,),
        "shared_gate": (H,),
    }
    assert set(shapes["w4a8"]) == {"experts", "shared", "correction_bias"}
    assert shapes["w4a8"]["experts"]["w13"]["codes"].dtype == jnp.uint8
    linear = jax.eval_shape(W4A8Linear(40, group_size=32).init, jax.random.key(0), _x(2, H))
    assert set(linear["params"]) == {"bias"}
    assert set(linear["w4a8"]["weight"]) == {"codes", "scale", "scaled_sum", "bias"}


def test_modules_compute_what_the_functional_layers_do(weights):
    x = _x(7, H)
    block = jax.jit(moe_block, static_argnums=2)
    assert_same_bits(jax.jit(MOE.apply)(moe_variables(weights), x), block(x, weights, ROUTING))
    packed = w4a8.pack_linear(w4a8.quantize(_x(40, H, seed=5), 32), _x(40, seed=6))
    expected = jax.jit(w4a8.linear)(x, packed)
    module = W4A8Linear(40, group_size=32, use_bias=False)
    assert_same_bits(jax.jit(module.apply)(linear_variables(packed), x), expected)
    module = W4A8Linear(40, group_size=32)
    unbiased = w4a8.pack_linear(w4a8.unpack_linear(packed)[0])
    assert_same_bits(jax.jit(module.apply)(linear_variables(unbiased, _x(40, seed=6)), x), expected)


def test_linen_and_nnx_agree(weights):
    x = _x(7, H, dtype=jnp.bfloat16)
    module = NnxMoE.from_weights(weights, ROUTING)
    assert_same_bits(jax.jit(MOE.apply)(moe_variables(weights), x), jax.jit(lambda m, x: m(x))(module, x))
    assert isinstance(module, nnx.Module)


def test_only_params_train(weights):
    variables = moe_variables(weights)
    packed, params = variables["w4a8"], variables["params"]
    x, target = _x(16, H), _x(16, H, seed=9)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state, packed):
        def loss(params):
            return jnp.mean((MOE.apply({"params": params, "w4a8": packed}, x) - target) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value, gradients

    state, losses = optimizer.init(params), []
    for _ in range(5):
        params, state, value, gradients = step(params, state, packed)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients))


def test_variables_survive_flax_serialization(weights):
    variables = moe_variables(weights)
    restored = serialization.from_bytes(variables, serialization.to_bytes(variables))
    jax.tree.map(assert_same_bits, variables, restored)


def test_a_larger_model_initialises_as_any_other():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x + W4A8MoE(E, I, ROUTING, group_size=32, name="moe")(linen.LayerNorm()(x))

    x = _x(3, H)
    variables = jax.jit(Block().init)(jax.random.key(0), x)
    assert set(variables["w4a8"]) == {"moe"}
    y = jax.jit(Block().apply)(variables, x)
    assert y.shape == x.shape
    assert bool(jnp.isfinite(y).all())
    assert float(jnp.abs(y - x).max()) > 0.01


def test_variables_of_another_size_are_refused(weights):
    with pytest.raises(ValueError, match=r"w13\.codes must have shape"):
        W4A8MoE(E, I + 16, ROUTING, group_size=32).apply(
            moe_variables(MoEWeights(weights.router, weights.experts)), _x(2, H)
        )
