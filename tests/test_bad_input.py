"""Arguments that do not fit: a Python error that names the argument, what was expected and what came."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import Activation, ExpertWeights, QuantizedTensor, Routing

from .reference import BACKENDS, on_device, one, random_batch, random_layer

E, H, I = 4, 64, 96  # noqa: E741
LAYER = random_layer()
X, WEIGHTS, IDS = random_batch()
LOGITS = np.zeros((9, E), np.float32)
SLOTS = np.ones((9, 2, H), np.float32)
TENSOR = one(LAYER.w13, 0)
BIAS = np.ones(2 * I, np.float32)
ACTIVATIONS = r"one of \['silu', 'swigluoai', 'gelu', 'gelu_tanh'\]"
SCHEMES = r"one of \['asymmetric', 'symmetric'\]"
BACKEND_NAMES = r"one of \['auto', 'cpu_int4', 'xla'\]"


@functools.cache
def experts():
    return LAYER.packed()


@functools.cache
def dense():
    return on_device(w4a8.pack_linear(TENSOR))


def fused(x=X, weights=WEIGHTS, ids=IDS, packed=None, **keywords):
    return w4a8.fused_experts(x, weights, ids, experts() if packed is None else packed, **keywords)


def apply(x=X, ids=IDS, packed=None, **keywords):
    return w4a8.apply_experts(x, ids, experts() if packed is None else packed, **keywords)


def moe(x=X, logits=LOGITS, packed=None, routing=Routing(2), **keywords):  # noqa: B008
    return w4a8.moe(x, logits, experts() if packed is None else packed, routing, **keywords)


def linear(x=X, packed=None, **keywords):
    return w4a8.linear(x, dense() if packed is None else packed, **keywords)


# what: call, argument, what was expected, what came; all but the call are regular expressions
COMMON = {
    "x int": (lambda run: run(x=X.astype(np.int32)), "x", "float32, bfloat16 or float16", "int32"),
    "x bool": (lambda run: run(x=X > 0), "x", "float32, bfloat16 or float16", "bool"),
    "x width": (lambda run: run(x=X[:, :60]), "x", r"\[..., 64\]", r"\(9, 60\)"),
    "x scalar": (lambda run: run(x=np.float32(1)), "x", r"\[..., 64\]", r"\(\)"),
    "scheme": (lambda run: run(activation_scheme="int8"), "activation_scheme", SCHEMES, "'int8'"),
    "scheme None": (lambda run: run(activation_scheme=None), "activation_scheme", SCHEMES, "None"),
    "backend": (lambda run: run(backend="cuda"), "backend", BACKEND_NAMES, "'cuda'"),
    "backend None": (lambda run: run(backend=None), "backend", BACKEND_NAMES, "None"),
}
OF_EXPERTS = {
    "experts": (lambda run: run(packed=tuple(LAYER)), "experts", "ExpertWeights", "tuple"),
    "linear weights": (lambda run: run(packed=dense()), "experts", "ExpertWeights", "LinearWeights"),
    "activation": (lambda run: run(activation="relu"), "activation", ACTIVATIONS, "'relu'"),
    "activation case": (lambda run: run(activation="SiLU"), "activation", ACTIVATIONS, "'SiLU'"),
    "activation number": (lambda run: run(activation=3), "activation", "", "3|int"),
    "activation None": (lambda run: run(activation=None), "activation", "", "None"),
    "on input": (
        lambda run: run(apply_router_weight_on_input=True),
        "apply_router_weight_on_input",
        "top_k = 1",
        "2",
    ),
}
OF_IDS = {
    "ids float": (lambda run: run(ids=IDS.astype(np.float32)), "ids", "integer", "float32"),
    "ids bool": (lambda run: run(ids=IDS > 0), "ids", "integer", "bool"),
    "ids rank": (lambda run: run(ids=IDS[:, 0]), "ids", r"\(9, 'k'\)", r"\(9,\)"),
    "ids rank up": (lambda run: run(ids=IDS[None]), "ids", r"\(9, 'k'\)", r"\(1, 9, 2\)"),
    "ids tokens": (lambda run: run(ids=IDS[:3]), "ids", r"\(9, 'k'\)", r"\(3, 2\)"),
    "ids without slots": (lambda run: run(ids=IDS[:, :0]), "ids", "k >= 1", r"\(9, 0\)"),
}
CALLS = {
    fused: COMMON | OF_EXPERTS | OF_IDS,
    apply: COMMON | OF_EXPERTS | OF_IDS,
    moe: COMMON | OF_EXPERTS,
    linear: COMMON,
}
FUSED = {
    "weights int": (lambda: fused(weights=IDS), "weights", "floating point", "int32"),
    "weights slots": (lambda: fused(weights=WEIGHTS[:, :1]), "weights", r"\(9, 2\)", r"\(9, 1\)"),
    "weights rank": (lambda: fused(weights=WEIGHTS[:, 0]), "weights", r"\(9, 2\)", r"\(9,\)"),
    "weights tokens": (lambda: fused(weights=WEIGHTS[:3]), "weights", r"\(9, 2\)", r"\(3, 2\)"),
    "weights transposed": (lambda: fused(weights=WEIGHTS.T), "weights", r"\(9, 2\)", r"\(2, 9\)"),
}
APPLY = {
    "weights without need": (
        lambda: apply(weights=WEIGHTS),
        "weights",
        "exactly when apply_router_weight_on_input",
        ".",
    ),
    "weights missing": (
        lambda: apply(ids=IDS[:, :1], apply_router_weight_on_input=True),
        "weights",
        "exactly when apply_router_weight_on_input",
        "None|False|without",
    ),
    "weights slots": (
        lambda: apply(ids=IDS[:, :1], weights=WEIGHTS, apply_router_weight_on_input=True),
        "weights",
        r"\(9, 1\)",
        r"\(9, 2\)",
    ),
}
COMBINE = {
    "slots dtype": (
        lambda: w4a8.combine(SLOTS.astype(jnp.bfloat16), WEIGHTS),
        "slots",
        "float32",
        "bfloat16",
    ),
    "slots rank": (lambda: w4a8.combine(SLOTS[0, 0], WEIGHTS), "slots", r"\[..., k, H\]", r"\(64,\)"),
    "weights slots": (
        lambda: w4a8.combine(SLOTS, WEIGHTS[:, :1]),
        "weights",
        r"\(9, 2\)",
        r"\(9, 1\)",
    ),
    "weights int": (lambda: w4a8.combine(SLOTS, IDS), "weights", "floating point", "int32"),
    "dtype int8": (
        lambda: w4a8.combine(SLOTS, WEIGHTS, dtype=np.int8),
        "dtype",
        "float32, bfloat16 or float16",
        "int8",
    ),
    "dtype float64": (
        lambda: w4a8.combine(SLOTS, WEIGHTS, dtype=np.float64),
        "dtype",
        "float32, bfloat16 or float16",
        "float64",
    ),
    "backend": (lambda: w4a8.combine(SLOTS, WEIGHTS, backend="gpu"), "backend", BACKEND_NAMES, "'gpu'"),
}
MOE = {
    "logits E": (lambda: moe(logits=LOGITS[:, :3]), "router_logits", r"\(9, 4\)", r"\(9, 3\)"),
    "logits rank": (lambda: moe(logits=LOGITS[0]), "router_logits", r"\(9, 4\)", r"\(4,\)"),
    "logits int": (lambda: moe(logits=LOGITS.astype(int)), "router_logits", "floating point", "int"),
    "top_k": (lambda: moe(routing=Routing(5)), "top_k", "at most the number of experts, 4", "5"),
    "routing": (lambda: moe(routing=2), "routing", "Routing", "int"),
    "correction_bias": (
        lambda: moe(correction_bias=np.zeros(3, np.float32)),
        "correction_bias",
        r"\(4,\)",
        r"\(3,\)",
    ),
}
LINEAR = {
    "tensor": (lambda: linear(packed=TENSOR), "weights", "LinearWeights", "QuantizedTensor"),
    "array": (lambda: linear(packed=BIAS), "weights", "LinearWeights", "ndarray"),
    "stack": (
        lambda: linear(packed=jax.tree.map(lambda leaf: leaf[None], dense())),
        "weights",
        "no leading axes",
        r"\(1, 12, 2, 256\)",
    ),
}


def spoilt(tensor, code=None, scale=None):
    codes, scales = tensor.codes.copy(), tensor.scale.copy()
    if code is not None:
        codes[..., 2, 3] = code
    if scale is not None:
        scales[..., 2, 0] = scale
    return QuantizedTensor(codes, scales, tensor.group_size)


def first(tensor, count):
    return jax.tree.map(lambda leaf: leaf[:count], tensor)


PACK_LINEAR = {
    "codes alone": (lambda: w4a8.pack_linear(TENSOR.codes), "weights", "QuantizedTensor", "ndarray"),
    "packed": (lambda: w4a8.pack_linear(dense()), "weights", "QuantizedTensor", "LinearWeights"),
    "bias size": (lambda: w4a8.pack_linear(TENSOR, BIAS[:3]), "bias", r"\(192,\)", r"\(3,\)"),
    "bias rank": (lambda: w4a8.pack_linear(TENSOR, BIAS[None]), "bias", r"\(192,\)", r"\(1, 192\)"),
    "bias int": (lambda: w4a8.pack_linear(TENSOR, BIAS.astype(int)), "bias", "floating point", "int64"),
    "code": (lambda: w4a8.pack_linear(spoilt(TENSOR, code=8)), "weights.codes", r"\[-8, 7\]", "8"),
    "no inputs": (
        lambda: w4a8.pack_linear(QuantizedTensor(TENSOR.codes[:, :0], TENSOR.scale[:, :1])),
        "weights.codes|K",
        "",
        r"\(192, 0\)",
    ),
}
PACK_EXPERTS = {
    "w13 array": (lambda: w4a8.pack_experts(LAYER.w13.codes, LAYER.w2), "w13", "QuantizedTensor", "ndarray"),
    "w2 None": (lambda: w4a8.pack_experts(LAYER.w13, None), "w2", "QuantizedTensor", "NoneType"),
    "rank": (
        lambda: w4a8.pack_experts(TENSOR, one(LAYER.w2, 0)),
        "w13",
        r"\[E, 2I, H\] and w2 \[E, H, I\]",
        r"\(192, 64\) and \(64, 96\)",
    ),
    "E": (
        lambda: w4a8.pack_experts(LAYER.w13, first(LAYER.w2, 2)),
        "w13",
        r"\(2, 192, 64\) to fit w2 \(2, 64, 96\)",
        r"\(4, 192, 64\)",
    ),
    "I": (
        lambda: w4a8.pack_experts(
            LAYER.w13, QuantizedTensor(LAYER.w2.codes[..., :64], LAYER.w2.scale[..., :2])
        ),
        "w13",
        r"\(4, 128, 64\) to fit w2 \(4, 64, 64\)",
        r"\(4, 192, 64\)",
    ),
    "swapped": (
        lambda: w4a8.pack_experts(LAYER.w2, LAYER.w13),
        "w13",
        r"\(4, 128, 192\) to fit w2 \(4, 192, 64\)",
        r"\(4, 64, 96\)",
    ),
    "no experts": (
        lambda: w4a8.pack_experts(first(LAYER.w13, 0), first(LAYER.w2, 0)),
        "w13",
        "at least one expert",
        "E = 0",
    ),
    "w13_bias": (
        lambda: w4a8.pack_experts(LAYER.w13, LAYER.w2, np.ones((4, 96), np.float32)),
        "w13_bias",
        r"\(4, 192\)",
        r"\(4, 96\)",
    ),
    "w2_bias": (
        lambda: w4a8.pack_experts(LAYER.w13, LAYER.w2, None, np.ones((4, 96), np.float32)),
        "w2_bias",
        r"\(4, 64\)",
        r"\(4, 96\)",
    ),
    "w13_bias int": (
        lambda: w4a8.pack_experts(LAYER.w13, LAYER.w2, np.ones((4, 192), np.int8)),
        "w13_bias",
        "floating point",
        "int8",
    ),
    "w13 code": (
        lambda: w4a8.pack_experts(spoilt(LAYER.w13, code=-9), LAYER.w2),
        "w13.codes",
        r"\[-8, 7\]",
        "-9",
    ),
    "w2 scale": (
        lambda: w4a8.pack_experts(LAYER.w13, spoilt(LAYER.w2, scale=np.nan)),
        "w2.scale",
        "",
        "NaN",
    ),
    "w13 group size": (
        lambda: w4a8.pack_experts(QuantizedTensor(LAYER.w13.codes, LAYER.w13.scale, 1), LAYER.w2),
        "group_size",
        "-1, None or 64",
        "1",
    ),
    "w2 scale count": (
        lambda: w4a8.pack_experts(LAYER.w13, QuantizedTensor(LAYER.w2.codes, LAYER.w2.scale[..., :2], 32)),
        "w2.scale",
        r"\(4, 64, 3\)",
        r"\(4, 64, 2\)",
    ),
}
ACTIVATION = {
    "kind": (lambda: Activation("relu"), "activation", ACTIVATIONS, "'relu'"),
    "limit 0": (lambda: Activation("swigluoai", limit=0), "limit", "positive or None", "0"),
    "limit text": (lambda: Activation("swigluoai", limit="7"), "limit", "a number", "'7'"),
    "alpha text": (lambda: Activation("swigluoai", alpha="x"), "alpha", "a number", "'x'"),
    "alpha NaN": (lambda: Activation("swigluoai", alpha=np.nan), "alpha", "finite", "nan"),
    "limit NaN": (lambda: Activation("swigluoai", limit=np.nan), "limit", "positive or None", "nan"),
}


def assert_refused(call, argument, expected, came):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value)
    assert re.search(rf"(^|\W)({argument})\W", message), message
    assert re.search(expected, message), message
    assert re.search(rf"(got|found|holds) .*({came})", message), message


@pytest.mark.parametrize(
    ("run", "case"),
    [
        pytest.param(run, case, id=f"{run.__name__}-{name}")
        for run in CALLS
        for name, case in CALLS[run].items()
    ],
)
def test_calls_refuse(run, case):
    call, *parts = case
    assert_refused(lambda: call(run), *parts)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{table}-{name}")
        for table in (
            "FUSED",
            "APPLY",
            "COMBINE",
            "MOE",
            "LINEAR",
            "PACK_LINEAR",
            "PACK_EXPERTS",
            "ACTIVATION",
        )
        for name, case in globals()[table].items()
    ],
)
def test_refused(case):
    assert_refused(*case)


def test_correct_calls_are_not_refused():
    for run in CALLS:
        assert np.isfinite(run()).all()
    one_slot = apply(ids=IDS[:, :1], weights=WEIGHTS[:, :1], apply_router_weight_on_input=True)
    assert one_slot.shape == (9, 1, H)


def other_leaves(part, **leaves):
    return lambda packed: dataclasses.replace(
        packed, **{part: dataclasses.replace(getattr(packed, part), **leaves)}
    )


#: Expert weights that nobody packed like this: changes of a packed layer, and the array at fault.
DAMAGED = {
    "a layer axis": (lambda p: jax.tree.map(lambda leaf: leaf[None], p), "w13.codes"),
    "no expert axis": (lambda p: jax.tree.map(lambda leaf: leaf[0], p), "w13.codes"),
    "fewer experts in w2": (lambda p: ExpertWeights(p.w13, first(p.w2, 2)), "w2.codes"),
    "signed codes": (other_leaves("w2", codes=np.zeros((4, 4, 3, 256), np.int8)), "w2.codes"),
    "float16 scales": (other_leaves("w2", scale=np.ones((4, 4, 3, 16), np.float16)), "w2.scale"),
    "scales of other groups": (other_leaves("w2", scale=np.ones((4, 4, 1, 16), np.float32)), "w2.scale"),
    "a flat bias": (other_leaves("w13", bias=np.ones((4, 192), np.float32)), "w13.bias"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", DAMAGED)
def test_damaged_experts(change, backend):
    if backend == "cpu_int4" and not w4a8.native_available():
        pytest.skip("there is no native backend here")
    damage, name = DAMAGED[change]
    with pytest.raises(
        (TypeError, ValueError, jax.errors.JaxRuntimeError), match=rf"{name} .*must (have|be) "
    ):
        fused(packed=damage(experts()), backend=backend).block_until_ready()
    assert np.isfinite(fused()).all()


def test_double_precision_tokens():
    """Without x64 they are float32 like any host array of JAX's; with it they are refused."""
    assert fused(x=X.astype(np.float64)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert_refused(
            lambda: fused(x=jnp.asarray(X, jnp.float64)), "x", "float32, bfloat16 or float16", "float64"
        )
