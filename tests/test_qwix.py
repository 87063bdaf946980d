"""qwix's INT4 arrays become ours without a change, and its models' experts run on our kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from tests.reference import assert_same_bits, relative_error

qwix = pytest.importorskip("qwix")

from flax import nnx  # noqa: E402

from jax_w4a8.blocks import MoEWeights  # noqa: E402
from jax_w4a8.nnx import W4A8MoE  # noqa: E402
from jax_w4a8.qwix import experts_from_qarrays, from_qarray, linear_from_qarray  # noqa: E402

E, H, I = 4, 64, 96  # noqa: E741
ROUTING = w4a8.Routing(top_k=2)


def _kernel(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(
    ("options", "group_size"),
    [
        ({"channelwise_axes": [0, 2]}, -1),
        ({"channelwise_axes": [0, 2], "tiled_axes": {1: 32}}, 32),
        ({"channelwise_axes": [0], "tiled_axes": {1: 32, 2: 48}}, 32),  # shared by 48 outputs
        ({"channelwise_axes": [2]}, -1),  # shared by all experts
        ({}, -1),  # one scale in all
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_codes_and_scales_convert_exactly(options, group_size, dtype):
    array = qwix.quantize(_kernel(E, H, I, dtype=dtype), "int4", **options)
    ours = from_qarray(array)
    assert ours.group_size == group_size
    assert ours.scale.dtype == array.scale.dtype == dtype
    assert ours.shape == (E, I, H)
    widened = array.astype(jnp.float32)  # or qwix rounds the product to the scales' dtype
    assert_same_bits(ours.dequantize(), jnp.swapaxes(qwix.dequantize(widened), 1, 2))
    unpacked, _ = w4a8.unpack_linear(w4a8.pack_linear(ours))
    assert_same_bits(unpacked.dequantize(), ours.dequantize())


def test_other_axes_and_dense_kernels():
    array = qwix.quantize(_kernel(I, H), "int4", channelwise_axes=[0], tiled_axes={1: 32})
    assert_same_bits(from_qarray(array, in_axis=1, out_axis=0).dequantize(), qwix.dequantize(array))
    x = _kernel(5, H, seed=1)
    packed = linear_from_qarray(array, in_axis=1, out_axis=0)
    y = jax.jit(w4a8.linear)(x, packed)
    assert relative_error(y, np.asarray(x @ qwix.dequantize(array).T)) < 0.02


def test_ragged_dot_runs_where_qwix_ragged_dot_did():
    array = qwix.quantize(_kernel(E, H, I), "int4", channelwise_axes=[0, 2])
    x, sizes = _kernel(20, H, seed=1), jnp.array([7, 0, 9, 4], jnp.int32)
    theirs = qwix.ragged_dot(x, array, sizes)
    ours = jax.jit(w4a8.ragged_dot)(x, linear_from_qarray(array), sizes)
    assert relative_error(ours, np.asarray(theirs)) < 0.02


class EinsumMoE(nnx.Module):
    """A user's MoE in einsums, which is what qwix intercepts."""

    def __init__(self, rngs):
        self.router = nnx.Param(_kernel(H, E, seed=1) / 8)
        self.wi_0 = nnx.Param(_kernel(E, H, I, seed=2) / 8)
        self.wi_1 = nnx.Param(_kernel(E, H, I, seed=3) / 8)
        self.wo = nnx.Param(_kernel(E, I, H, seed=4) / 10)

    def __call__(self, x):
        weights, ids = w4a8.route(jnp.asarray(x @ self.router[...]), ROUTING)
        gate = jnp.einsum("th,ehi->tei", x, jnp.asarray(self.wi_0))
        inner = jax.nn.silu(gate) * jnp.einsum("th,ehi->tei", x, jnp.asarray(self.wi_1))
        outputs = jnp.einsum("tei,eih->teh", inner, jnp.asarray(self.wo))
        chosen = jnp.take_along_axis(outputs, ids[..., None], axis=1)
        return jnp.sum(chosen * weights[..., None], axis=1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix calls what Flax deprecates
@pytest.mark.parametrize("tile", [None, 32])
def test_the_experts_of_a_qwix_model_run_on_our_kernels(tile):
    x = _kernel(12, H, seed=5)
    model = EinsumMoE(nnx.Rngs(0))
    rules = [qwix.QuantizationRule(op_names=("einsum",), weight_qtype="int4", tile_size=tile)]
    quantized = qwix.quantize_model(model, qwix.PtqProvider(rules), x)
    experts = experts_from_qarrays(quantized.wi_0, quantized.wi_1, quantized.wo)
    assert experts.w13.group_size == (tile or -1)
    module = W4A8MoE.from_weights(MoEWeights(model.router[...], experts), ROUTING)
    ours = jax.jit(lambda module, x: module(x))(module, x)
    theirs = quantized(x)  # the same weights, activations in floating point
    assert relative_error(ours, np.asarray(theirs)) < 0.02
    assert relative_error(theirs, np.asarray(model(x))) > 0.05  # INT4 did something


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: _kernel(H, I), TypeError, r"array must be a qwix\.QArray, got ArrayImpl"),
        (
            lambda: qwix.quantize(_kernel(H, I), "float8_e4m3fn", channelwise_axes=[1]),
            TypeError,
            "array must hold int4 values, got float8_e4m3fn",
        ),
        (
            lambda: qwix.quantize(_kernel(H, I), "int8", channelwise_axes=[1]),
            ValueError,
            r"array\.codes must lie in \[-8, 7\]",
        ),
        (
            lambda: qwix.quantize(_kernel(H, I), "int4", channelwise_axes=[1], calibration_method="minmax"),
            ValueError,
            "array must be symmetric, got one with a zero point",
        ),
        (
            lambda: qwix.quantize(_kernel(H, I), "int4", channelwise_axes=[1], tiled_axes={0: 16}),
            ValueError,
            "tiles of a multiple of 32 along its contracted axis, got 16",
        ),
    ],
)
def test_what_cannot_convert_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        from_qarray(make())


def test_gate_and_up_of_different_rules_are_refused():
    gate = qwix.quantize(_kernel(E, H, I), "int4", channelwise_axes=[0, 2])
    up = qwix.quantize(_kernel(E, H, I), "int4", channelwise_axes=[0, 2], tiled_axes={1: 32})
    with pytest.raises(ValueError, match="gate and up must have one scheme"):
        experts_from_qarrays(gate, up, gate)
