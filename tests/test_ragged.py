"""``ragged_dot``: the grouped product on packed weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from tests import reference
from tests.reference import assert_rows_close, assert_same_bits

E, N, K, M = 5, 40, 96, 23
SIZES = np.array([4, 0, 9, 4, 4], np.int32)
BACKENDS = ["cpu_int4", "xla"]
ragged_dot = jax.jit(w4a8.ragged_dot, static_argnames=("activation_scheme", "backend"))


@pytest.fixture(scope="module")
def layer():
    rng = np.random.default_rng(3)
    codes = reference.random_weights(rng, (E, N, K))
    bias = rng.normal(size=(E, N)).astype(np.float32)
    x = rng.normal(size=(M, K)).astype(np.float32)
    return reference.on_device(codes), bias, x


def _expected(codes, bias, x, scheme):
    """Row by row, in float64 beside exact integer sums; zeros past the last group."""
    y = np.zeros((len(x), N))
    start = 0
    for group, size in enumerate(SIZES):
        rows = slice(start, start + size)
        one = reference.one(jax.tree.map(np.asarray, codes), group)
        y[rows] = reference.linear(x[rows], one, bias[group], scheme)
        start += size
    return y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["asymmetric", "symmetric"])
def test_follows_the_contract(layer, backend, scheme):
    codes, bias, x = layer
    y = ragged_dot(x, w4a8.pack_linear(codes, bias), SIZES, activation_scheme=scheme, backend=backend)
    assert_rows_close(y, _expected(codes, bias, x, scheme), 1e-5)
    assert not np.asarray(y[SIZES.sum() :]).any()


@pytest.mark.parametrize(
    ("backend", "dtype"), [*((b, jnp.float32) for b in BACKENDS), (BACKENDS[0], jnp.bfloat16)]
)
def test_each_group_equals_the_dense_linear_bit_for_bit(layer, backend, dtype):
    codes, bias, x = layer
    packed = w4a8.pack_linear(codes, bias)
    x = jnp.asarray(x, dtype)
    y = ragged_dot(x, packed, SIZES, backend=backend)
    start = 0
    for group, size in enumerate(SIZES):
        one = jax.tree.map(lambda leaf, group=group: leaf[group], packed)
        if size:
            alone = reference.compiled.linear(x[start : start + size], one, backend=backend)
            assert_same_bits(y[start : start + size], alone, f"group {group}")
        start += size


def test_stands_in_for_lax_ragged_dot():
    """Code written against ``jax.lax.ragged_dot``, with weights ``[E, K, N]`` that INT4 holds exactly."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.integers(-7, 8, (E, K, N)) / 8, jnp.float32)
    x = jnp.asarray(rng.integers(-127, 128, (M, K)), jnp.float32)
    x = x.at[:, 0].set(127)  # the row's scale is then 1: INT8 holds it exactly, too
    codes = w4a8.QuantizedTensor(
        jnp.swapaxes(weights * 8, 1, 2).astype(jnp.int8), jnp.full((E, N, 1), 0.125, jnp.float32), -1
    )
    y = ragged_dot(x, w4a8.pack_linear(codes), SIZES, activation_scheme="symmetric")
    assert_same_bits(y, jax.lax.ragged_dot(x, weights, SIZES, precision="highest"))


def test_results_do_not_depend_on_threads_or_instruction_set(layer):
    if not w4a8.native_available():
        pytest.skip("no native backend here")
    codes, bias, _ = layer
    packed = w4a8.pack_linear(codes, bias)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, K)).astype(np.float32)
    sizes = np.array([300, 1, 0, 60, 30])
    y = ragged_dot(x, packed, sizes, backend="cpu_int4")
    with w4a8.thread_limit(1):
        assert_same_bits(y, ragged_dot(x, packed, sizes, backend="cpu_int4"))
    for name in w4a8.instruction_sets():
        with w4a8.using_instruction_set(name):
            assert_same_bits(y, ragged_dot(x, packed, sizes, backend="cpu_int4"), name)


def test_an_mlp_of_two_equals_fused_experts():
    """Sorted by hand, two products with an activation between them, put back: the MoE layer's own bits."""
    layer = reference.random_layer(experts=E, hidden=64, inner=96)
    batch = reference.random_batch(tokens=9, hidden=64, experts=E, top_k=2)
    w13, w2 = reference.on_device((layer.w13, layer.w2))
    expected = reference.compiled.apply_experts(
        batch.x,
        batch.ids,
        w4a8.pack_experts(w13, w2),
        backend="cpu_int4" if w4a8.native_available() else "xla",
    )
    order = np.argsort(batch.ids.reshape(-1), kind="stable")
    sizes = np.bincount(batch.ids.reshape(-1), minlength=E)
    gate, up = jnp.split(ragged_dot(batch.x[order // 2], w4a8.pack_linear(w13), sizes), 2, axis=-1)
    y = ragged_dot(gate * jax.nn.sigmoid(gate) * up, w4a8.pack_linear(w2), sizes)
    slots = jnp.zeros_like(y).at[order].set(y).reshape(expected.shape)
    # The kernel's own sigmoid differs from XLA's in last bits, which may move a code of the second product.
    assert reference.relative_error(slots, np.asarray(expected)) < 2e-3


def test_gradients_are_those_of_the_float_model(layer):
    codes, bias, x = layer
    packed = w4a8.pack_linear(codes, bias)
    cotangent = np.random.default_rng(5).normal(size=(M, N)).astype(np.float32)

    def ours(x, scale, bias):
        parts = {"scale": scale, "bias": bias}
        weights = type(packed)(**{**vars(packed), **parts})
        return jnp.vdot(w4a8.ragged_dot(x, weights, SIZES), cotangent)

    def float_model(x, scale, bias):
        weights, bias = w4a8.unpack_linear(type(packed)(**{**vars(packed), "scale": scale, "bias": bias}))
        groups = jnp.repeat(jnp.arange(E), SIZES, total_repeat_length=M)
        codes = weights.codes.astype(jnp.float32).reshape(E, N, -1, 32)
        matrices = (codes * weights.scale[..., None]).reshape(E, N, K)
        y = jnp.einsum("mk,mnk->mn", x, matrices[groups], precision="highest") + bias[groups]
        return jnp.vdot(jnp.where(jnp.arange(M)[:, None] < SIZES.sum(), y, 0), cotangent)

    arguments = (jnp.asarray(x), packed.scale, packed.bias)
    for found, expected in zip(
        jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(*arguments),
        jax.jit(jax.grad(float_model, argnums=(0, 1, 2)))(*arguments),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_vmap_equals_a_loop(layer):
    codes, _, x = layer
    packed = w4a8.pack_linear(codes)
    xs = jnp.stack([x, x[::-1]])
    sizes = jnp.stack([SIZES, SIZES[::-1]])
    together = jax.jit(jax.vmap(w4a8.ragged_dot, in_axes=(0, None, 0)))(xs, packed, sizes)
    for i in range(2):
        assert_same_bits(together[i], ragged_dot(xs[i], packed, sizes[i]))


def test_no_rows(layer):
    codes, _, _ = layer
    for backend in BACKENDS:
        y = w4a8.ragged_dot(jnp.zeros((0, K)), w4a8.pack_linear(codes), np.zeros(E, int), backend=backend)
        assert y.shape == (0, N)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rhs": jnp.zeros((E, K, N))}, TypeError, "rhs must be LinearWeights"),
        ({"lhs": jnp.zeros((M, K - 1))}, ValueError, "lhs must have shape"),
        ({"lhs": jnp.zeros((2, M, K))}, ValueError, r"lhs must have shape \[M, 96\]"),
        ({"lhs": jnp.zeros((M, K), jnp.int32)}, TypeError, "lhs must be float32"),
        ({"group_sizes": SIZES[:-1]}, ValueError, "group_sizes must have shape"),
        ({"group_sizes": SIZES * 1.0}, TypeError, "group_sizes must be integers"),
        ({"group_sizes": SIZES - 1}, ValueError, "group_sizes must not be negative"),
        ({"group_sizes": SIZES * 2}, ValueError, "group_sizes add up to 42, and lhs has 23 rows"),
        ({"activation_scheme": "int8"}, ValueError, "activation_scheme must be one of"),
        ({"backend": "gpu"}, ValueError, "backend must be one of"),
    ],
)
def test_bad_arguments_are_named(layer, change, error, text):
    codes, _, x = layer
    arguments = {"lhs": x, "rhs": w4a8.pack_linear(codes), "group_sizes": SIZES}
    with pytest.raises(error, match=text):
        w4a8.ragged_dot(**(arguments | change))


def test_one_matrix_is_refused(layer):
    codes, _, x = layer
    one = w4a8.pack_linear(jax.tree.map(lambda leaf: leaf[0], codes))
    with pytest.raises(ValueError, match="rhs must be a stack of matrices"):
        w4a8.ragged_dot(x, one, SIZES)
