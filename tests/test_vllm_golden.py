"""The expert call against outputs of the reference system's own kernel."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import QuantizedTensor

from .reference import ROOT, Layer, compiled, relative_error, unquantized_experts

DIRECTORIES = (Path(__file__).parent / "data" / "vllm", ROOT.parent / "shared" / "golden" / "vllm")
NAMES = (
    "oai_bias_g-1_f32",
    "oai_bias_g32_bf16",
    "onin_g32_f32",
    "silu_bias_g64_f32",
    *(f"silu_g{g}_{dtype}" for g in (-1, 32, 64, 128) for dtype in ("f32", "bf16", "f16")),
)
#: For the backend that takes seconds to compile.
SOME = (*NAMES[:4], "silu_g32_bf16", "silu_g-1_bf16", "silu_g128_f16")
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def load(name):
    for directory in DIRECTORIES:
        if (directory / f"{name}.npz").exists():
            with np.load(directory / f"{name}.npz") as data:
                return dict(data)
    pytest.skip(f"{name}.npz is in none of {', '.join(map(str, DIRECTORIES))}")


def tolerance(dtype, group_size):
    """Relative L2. With bfloat16 and channel-wise scales the reference keeps bfloat16 intermediates."""
    if dtype == "bf16":
        return 1.2e-2 if group_size == -1 else 4e-3
    return {"f32": 2e-6, "f16": 1e-3}[dtype]


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "cpu_int4") for name in NAMES), *((name, "xla") for name in SOME)]
)
def test_outputs_of_vllm(name, backend):
    if backend == "cpu_int4" and not w4a8.native_available():
        pytest.skip("there is no native backend here")
    data = load(name)
    meta = json.loads(str(data["meta"]))
    group_size, dtype, activation = meta["group_size"], meta["dtype"], meta["act"]
    on_input = meta["apply_router_weight_on_input"]
    layer = Layer(
        QuantizedTensor(data["w13"], data["w13_scale"], group_size),
        QuantizedTensor(data["w2"], data["w2_scale"], group_size),
        data.get("b13"),
        data.get("b2"),
    )
    x = data["x"].astype(DTYPES[dtype])
    y = compiled.fused_experts(
        x,
        data["topk_weights"],
        data["topk_ids"],
        layer.packed(),
        activation=activation,
        apply_router_weight_on_input=on_input,
        backend=backend,
    )
    assert y.dtype == x.dtype
    assert relative_error(y, data["out"].astype(np.float64)) < tolerance(dtype, group_size)
    exact = unquantized_experts(
        x.astype(np.float32), data["topk_weights"], data["topk_ids"], layer, activation, on_input
    )
    assert relative_error(y, exact) <= 1.01 * relative_error(data["out"], exact)
    assert relative_error(y, exact) < 0.03
