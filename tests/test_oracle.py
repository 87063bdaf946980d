"""The oracle's choices and reasons, and the faults that public oracles had in them."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import jax
import jax.numpy as jnp
import pytest

from jax_w4a8 import oracle
from jax_w4a8.experts.base import Activation, Backend, unsupported_reason
from jax_w4a8.experts.cpu_int4 import CPUExpertsInt4
from jax_w4a8.experts.xla import XLAExperts
from jax_w4a8.oracle import (
    BackendVerdict,
    MoEConfig,
    QuantKey,
    W4A8Int8MoeBackend,
    explain,
    map_w4a8_int8_backend,
    resolve_backend,
    select_w4a8_int8_moe_backend,
)
from jax_w4a8.quantization import GroupShape, weight_key
from jax_w4a8.routing import Routing

CPU_INT4, XLA = W4A8Int8MoeBackend
BASE = MoEConfig(num_experts=8, top_k=2, hidden_size=512, intermediate_size=256, platform="cpu")
PER_TOKEN = QuantKey(jnp.int8, jnp.float32, GroupShape(1, -1))
WEIGHTS = weight_key(128, jnp.bfloat16)


class Native(CPUExpertsInt4):
    """The native backend with its library present, or hidden, whatever this machine has."""

    missing: str | None = None

    @classmethod
    def unavailable_reason(cls, platform: str) -> str | None:
        return cls.missing


@pytest.fixture(autouse=True)
def native(monkeypatch):
    """A native backend that says yes; set ``missing`` to change that."""
    double = type("NativeDouble", (Native,), {})
    classes: dict[W4A8Int8MoeBackend, type[Backend]] = {CPU_INT4: double, XLA: XLAExperts}
    monkeypatch.setattr(oracle, "backend_class", classes.__getitem__)
    monkeypatch.setattr(oracle, "_logged", set())
    return double


def config(**changes):
    return dataclasses.replace(BASE, **changes)


ROUTINGS = {
    "none": None,
    "softmax": Routing(2, renormalize=False),
    "softmax-renormalised": Routing(2),
    "sigmoid": Routing(2, "sigmoid"),
    "sqrtsoftplus": Routing(2, "sqrtsoftplus", routed_scaling_factor=1.5),
    "grouped-max": Routing(2, "softmax", False, 4, 2, "max"),
    "deepseek-v3": Routing(2, "sigmoid", True, 4, 2, None, 2.5, 1e-20),
}


@pytest.mark.parametrize("group_size", [-1, 32, 64, 96, 128, 160, 256, 512, 1024])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_group_size_and_routing_is_accepted(group_size, routing, native):
    for scale_dtype, in_dtype, scheme in itertools.product(
        (jnp.bfloat16, jnp.float16, jnp.float32),
        (jnp.float32, "bfloat16", jnp.float16),
        ("asymmetric", "symmetric"),
    ):
        layer = config(routing=ROUTINGS[routing], in_dtype=in_dtype, activation_scheme=scheme)
        key = weight_key(group_size, scale_dtype)
        for activations in (None, PER_TOKEN, dataclasses.replace(PER_TOKEN, symmetric=False)):
            assert unsupported_reason(layer, key, activations) is None
    assert select_w4a8_int8_moe_backend(layer, key) == (CPU_INT4, native)
    elsewhere = dataclasses.replace(layer, platform="tpu")
    assert select_w4a8_int8_moe_backend(elsewhere, key) == (XLA, XLAExperts)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", Activation("swigluoai", 1, 4)])
def test_every_activation_is_accepted(activation):
    assert unsupported_reason(config(activation=activation), WEIGHTS, None) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2880, "intermediate_size": 80},  # short last groups
        {"hidden_size": 1, "intermediate_size": 1, "num_experts": 1, "top_k": 1},
        {"ep_size": 4, "tp_size": 2},
        {"top_k": 8},
    ],
)
def test_sizes_are_accepted(changes):
    assert unsupported_reason(config(**changes), WEIGHTS, PER_TOKEN) is None


def test_channelwise_shards_need_no_whole_groups():
    layer = config(intermediate_size=96, tp_size=2)
    assert unsupported_reason(layer, weight_key(-1, jnp.float32), None) is None


def test_channelwise_shards_need_whole_blocks():
    reason = unsupported_reason(
        config(intermediate_size=96, tp_size=4), weight_key(-1, jnp.float32), PER_TOKEN
    )
    assert reason == "intermediate_size / tp_size = 24 must be a multiple of 16 channels"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ({"top_k": 0}, "top_k must be a positive integer, got 0"),
        ({"hidden_size": -1}, "hidden_size must be a positive integer, got -1"),
        ({"intermediate_size": 2.5}, "intermediate_size must be a positive integer, got 2.5"),
        ({"top_k": 9}, "top_k = 9 experts can't be chosen out of E = 8"),
        ({"in_dtype": jnp.int8}, "in_dtype must be float32, bfloat16 or float16, got int8"),
        ({"in_dtype": "f13"}, "in_dtype must be float32, bfloat16 or float16, got 'f13'"),
        (
            {"activation": "relu2"},
            "activation must be one of ['silu', 'swigluoai', 'gelu', 'gelu_tanh'], got 'relu2'",
        ),
        (
            {"activation_scheme": "static"},
            "activation_scheme must be one of ['asymmetric', 'symmetric'], got 'static'",
        ),
        ({"routing": Routing(3)}, "routing.top_k must equal top_k = 2, got 3"),
        ({"routing": "softmax"}, "routing must be a Routing or None, got 'softmax'"),
        (
            {"routing": Routing(2, "softmax", True, 3, 1)},
            "routing: num_expert_group must divide the number of experts, 8, got 3",
        ),
        ({"ep_size": 0}, "ep_size must be a positive integer, got 0"),
        ({"tp_size": 0}, "tp_size must be a positive integer, got 0"),
        ({"ep_size": 3}, "E = 8 experts can't be split over ep_size = 3"),
        ({"tp_size": 3}, "intermediate_size = 256 can't be split over tp_size = 3"),
        (
            {"tp_size": 4},
            "intermediate_size / tp_size = 64 must be a multiple of the group size, got g = 128",
        ),
    ],
)
def test_layer_is_refused(changes, reason):
    assert unsupported_reason(config(**changes), WEIGHTS, PER_TOKEN) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.int8}, "weights must be int4, got int8"),
        ({"dtype": "nf4"}, "weights must be int4, got 'nf4'"),
        ({"symmetric": False}, "weights must be symmetric, got asymmetric ones (with zero points)"),
        (
            {"scale_dtype": jnp.float8_e4m3fn},
            "weight scales must be bfloat16, float16 or float32, got float8_e4m3fn",
        ),
        *[
            (
                {"group_shape": GroupShape(*shape)},
                "weight group_shape must be (-1, 1) for channel-wise or (1, g) with g a positive "
                f"multiple of 32, got {shape}",
            )
            for shape in [(1, 1), (1, 0), (1, -1), (1, 7), (1, 48), (1, -32), (-1, -1), (128, 128)]
        ],
    ],
)
def test_weights_are_refused(changes, reason):
    assert unsupported_reason(BASE, dataclasses.replace(WEIGHTS, **changes), None) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float8_e4m3fn}, "activations must be int8, got float8_e4m3fn"),
        ({"dtype": jnp.int4}, "activations must be int8, got int4"),
        *[
            (
                {"group_shape": GroupShape(*shape)},
                f"activations must be quantised per token, group_shape (1, -1), got {shape}",
            )
            for shape in [(-1, -1), (1, 128), (-1, 1)]
        ],
    ],
)
def test_activations_are_refused(changes, reason):
    key = dataclasses.replace(PER_TOKEN, **changes)
    assert unsupported_reason(BASE, WEIGHTS, key) == reason


def test_hidden_library_falls_back(native):
    native.missing = "the native extension can't be imported (gone)"
    assert select_w4a8_int8_moe_backend(BASE, WEIGHTS) == (XLA, XLAExperts)
    assert resolve_backend("auto", "cpu") is XLAExperts


@pytest.mark.parametrize("name", ["cpu_int4", "CPU_INT4", "Cpu_Int4", CPU_INT4])
def test_explicit_native(name, native):
    assert select_w4a8_int8_moe_backend(config(moe_backend=name), WEIGHTS) == (CPU_INT4, native)
    assert resolve_backend(name, "cpu") is native


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "some-plugin"])
def test_explicit_xla(platform):
    layer = config(moe_backend="XLA", platform=platform)
    assert select_w4a8_int8_moe_backend(layer, WEIGHTS) == (XLA, XLAExperts)
    assert resolve_backend("xla", platform) is XLAExperts


def test_explicit_request_is_never_replaced(native):
    native.missing = "the library is gone"
    explicit = config(moe_backend="cpu_int4")
    with pytest.raises(ValueError, match=r"moe_backend='cpu_int4' can't .*: the library is gone"):
        select_w4a8_int8_moe_backend(explicit, WEIGHTS)
    with pytest.raises(ValueError, match=r"backend='cpu_int4' can't .*: the library is gone"):
        resolve_backend("cpu_int4", "cpu")


@pytest.mark.parametrize("backend", ["cpu_int4", "xla"])
def test_explicit_request_names_the_layers_reason(backend):
    layer = config(moe_backend=backend, ep_size=3)
    with pytest.raises(ValueError, match="E = 8 experts can't be split over ep_size = 3"):
        select_w4a8_int8_moe_backend(layer, WEIGHTS)


def test_explicit_backend_of_another_platform():
    reason = r"it does not run on platform 'gpu', whose backends are \['XLA'\]"
    with pytest.raises(ValueError, match=reason):
        select_w4a8_int8_moe_backend(config(moe_backend="cpu_int4", platform="gpu"), WEIGHTS)
    with pytest.raises(ValueError, match=reason):
        resolve_backend(CPU_INT4, "gpu")


def test_nothing_left_lists_every_reason(native):
    native.missing = "the library is gone"
    with pytest.raises(NotImplementedError) as caught:
        select_w4a8_int8_moe_backend(config(top_k=9), WEIGHTS)
    assert str(caught.value) == (
        "no W4A8 INT8 backend runs this layer on platform 'cpu': CPU_INT4: no, the library is gone; "
        "XLA: no, top_k = 9 experts can't be chosen out of E = 8"
    )


def test_nothing_left_on_a_platform(native, monkeypatch):
    native.missing = "the library is gone"
    monkeypatch.setattr(XLAExperts, "unavailable_reason", classmethod(lambda cls, p: f"not on {p}"))
    with pytest.raises(NotImplementedError, match="the library is gone; XLA: no, not on cpu"):
        resolve_backend("auto", "cpu")


@pytest.mark.parametrize("name", ["cpu", "cpu_int8", "", " xla", None, 3])
def test_unknown_names(name):
    expected = r"must be one of \['auto', 'cpu_int4', 'xla'\], got "
    with pytest.raises(ValueError, match="moe_backend " + expected):
        map_w4a8_int8_backend(name)
    with pytest.raises(ValueError, match="moe_backend " + expected):
        select_w4a8_int8_moe_backend(config(moe_backend=name), WEIGHTS)
    with pytest.raises(ValueError, match="^backend " + expected):
        resolve_backend(name)


def test_known_names():
    assert map_w4a8_int8_backend("AUTO") is None
    assert map_w4a8_int8_backend("xla") is XLA
    assert map_w4a8_int8_backend(XLA) is XLA


@pytest.mark.parametrize("call", [select_w4a8_int8_moe_backend, explain])
def test_wrong_types(call):
    with pytest.raises(TypeError, match="config must be a MoEConfig, got dict"):
        call({}, WEIGHTS)
    with pytest.raises(TypeError, match="weight_key must be a QuantKey, got str"):
        call(BASE, "int4")
    with pytest.raises(TypeError, match="activation_key must be a QuantKey or None, got str"):
        call(BASE, WEIGHTS, "int8")


def test_default_platform_follows_jax(native, monkeypatch):
    seen = []
    monkeypatch.setattr(native, "unavailable_reason", classmethod(lambda cls, p: seen.append(p)))
    layer = config(platform=None)
    assert jax.default_backend() == "cpu"
    assert select_w4a8_int8_moe_backend(layer, WEIGHTS) == (CPU_INT4, native)
    assert resolve_backend() is native
    with jax.default_device(jax.devices("cpu")[0]):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert resolve_backend() is native
    assert resolve_backend() is XLAExperts
    assert select_w4a8_int8_moe_backend(layer, WEIGHTS) == (XLA, XLAExperts)
    assert seen == ["cpu"] * 3


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "jax_w4a8"]


def test_each_choice_is_logged_once(native, caplog):
    caplog.set_level(logging.INFO, "jax_w4a8")
    for _ in range(3):
        select_w4a8_int8_moe_backend(BASE, WEIGHTS)
        resolve_backend("auto", "cpu")
    assert messages(caplog) == ["W4A8 INT8 layers run on backend CPU_INT4 out of ['CPU_INT4', 'XLA']"]
    caplog.clear()
    for reason in ("gone", "gone", "too old", "gone"):
        native.missing = reason
        select_w4a8_int8_moe_backend(BASE, WEIGHTS)
        resolve_backend("auto", "cpu")
    start = "W4A8 INT8 layers run on backend XLA out of ['CPU_INT4', 'XLA']; CPU_INT4: no, "
    assert messages(caplog) == [start + "gone", start + "too old"]
    assert {r.levelno for r in caplog.records} == {logging.INFO}


def test_a_choice_nobody_could_read_is_logged_later(caplog):
    caplog.set_level(logging.WARNING, "jax_w4a8")
    resolve_backend("auto", "cpu")
    assert messages(caplog) == []
    caplog.set_level(logging.INFO, "jax_w4a8")
    resolve_backend("auto", "cpu")
    assert len(messages(caplog)) == 1


def test_explain(native):
    native.missing = "the library is gone"
    verdicts = explain(config(moe_backend="cpu_int4"), WEIGHTS, PER_TOKEN)
    assert verdicts == (
        BackendVerdict(CPU_INT4, False, "the library is gone"),
        BackendVerdict(XLA, True),
    )
    assert str(verdicts) == "CPU_INT4: no, the library is gone\nXLA: yes"
    refused = explain(config(ep_size=3, platform="gpu"), WEIGHTS)
    assert str(refused) == (
        "XLA: no, E = 8 experts can't be split over ep_size = 3\n"
        "CPU_INT4: no, it does not run on platform 'gpu', whose backends are ['XLA']"
    )


def test_explain_agrees_with_the_choice(native):
    for missing, platform, top_k in itertools.product((None, "gone"), ("cpu", "tpu"), (2, 9)):
        native.missing = missing
        layer = config(platform=platform, top_k=top_k)
        supported = [v.backend for v in explain(layer, WEIGHTS) if v.supported]
        if supported:
            assert select_w4a8_int8_moe_backend(layer, WEIGHTS)[0] is supported[0]
        else:
            with pytest.raises(NotImplementedError):
                select_w4a8_int8_moe_backend(layer, WEIGHTS)


def test_real_classes(monkeypatch):
    monkeypatch.undo()
    assert oracle.backend_class(CPU_INT4) is CPUExpertsInt4
    assert oracle.backend_class(XLA) is XLAExperts
    reason = CPUExpertsInt4.unavailable_reason("cpu")
    expected = XLAExperts if reason else CPUExpertsInt4
    assert select_w4a8_int8_moe_backend(BASE, WEIGHTS)[1] is expected
    assert resolve_backend("auto", "cpu") is expected
