"""The numeric contract in slow, plain numpy, and what tests share.

Activations are quantised in float32, operation by operation as the contract says; sums of codes are exact;
everything else is float64.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_w4a8 as w4a8
from jax_w4a8 import Activation, QuantizedTensor

BACKENDS = ("cpu_int4", "xla")
SCHEMES = ("asymmetric", "symmetric")
#: Half a unit in the last place, relative.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: A value this close (in codes) to the middle between two may be quantised to either.
FRAGILE = 5e-4


# ---------------------------------------------------------------------------------------------------------
# The contract.


class Rows(NamedTuple):
    """value = (code - zero) * scale, by row; scale is NaN for a row that holds NaN or infinity."""

    codes: np.ndarray
    zero: np.ndarray
    scale: np.ndarray
    scaled: np.ndarray  # float32 row * factor: what was rounded


def quantize_row(row: np.ndarray, scheme: str) -> tuple[Any, Any, Any, Any]:
    """Rule 1 for one float32 row: codes, zero point, row scale, and values before rounding."""
    assert row.dtype == np.float32
    nothing = np.zeros_like(row)
    if not np.isfinite(row).all():
        return nothing, 0, np.float32("nan"), nothing
    low = min(np.float32(0), row.min(initial=0))
    high = max(np.float32(0), row.max(initial=0))
    extent = max(-low, high) if scheme == "symmetric" else high - low
    if extent < np.float32(2.0**-100):
        return nothing, 0, np.float32(0), nothing
    if scheme == "symmetric":
        factor = np.float32(127) / extent
        return np.clip(np.rint(row * factor), -127, 127), 0, extent / np.float32(127), row * factor
    factor = np.float32(255) / extent
    below, above = low * factor, high * factor
    zero = np.float32(-128) - below if (below + above) - 1 > 0 else np.float32(127) - above
    zero = np.rint(np.clip(zero, -128, 127))
    codes = np.clip(np.rint(row * factor) + zero, -128, 127)
    return codes, zero, np.float32(1) / factor, row * factor


def quantize_rows(x: np.ndarray, scheme: str) -> Rows:
    """Rule 1 for float32 ``[M, K]``."""
    parts = [quantize_row(row, scheme) for row in x]
    if not parts:
        return Rows(np.zeros(x.shape), np.zeros(0), np.zeros(0), np.zeros(x.shape))
    return Rows(*(np.stack(part).astype(np.float64) for part in zip(*parts, strict=True)))


def multiply(rows: Rows, weights: QuantizedTensor, bias: np.ndarray | None = None) -> np.ndarray:
    """Rule 3, float64 ``[M, N]``."""
    codes, scale = np.asarray(weights.codes, np.float64), np.asarray(weights.scale, np.float64)
    k = codes.shape[1]
    width = k if weights.group_size in (-1, None) else weights.group_size
    total = np.zeros((rows.codes.shape[0], codes.shape[0]))
    for group in range(math.ceil(k / width)):
        part = slice(group * width, (group + 1) * width)
        whole_numbers = (rows.codes[:, part] - rows.zero[:, None]) @ codes[:, part].T  # exact
        total += whole_numbers * scale[:, group]
    return total * rows.scale[:, None] + (0 if bias is None else bias)


def linear(
    x: np.ndarray,
    weights: QuantizedTensor,
    bias: np.ndarray | None = None,
    scheme: str = SCHEMES[0],
) -> np.ndarray:
    """A dense layer, float64 ``[M, N]``."""
    return multiply(quantize_rows(x, scheme), weights, bias)


def dequantized(weights: QuantizedTensor) -> np.ndarray:
    """float64 weights ``[..., N, K]``."""
    codes, scale = np.asarray(weights.codes, np.float64), np.asarray(weights.scale, np.float64)
    k = codes.shape[-1]
    width = k if weights.group_size in (-1, None) else weights.group_size
    return codes * np.repeat(scale, width, axis=-1)[..., :k]


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def activate(gate: np.ndarray, up: np.ndarray, activation: str | Activation) -> np.ndarray:
    """Rule 4 in float64."""
    if isinstance(activation, str):
        activation = Activation(activation)
    if activation.kind == "silu":
        return gate * sigmoid(gate) * up
    if activation.kind == "swigluoai":
        limit = math.inf if activation.limit is None else activation.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1) * gate * sigmoid(activation.alpha * gate)
    if activation.kind == "gelu":
        erfc = np.vectorize(math.erfc, otypes=[np.float64])
        return gate * 0.5 * erfc(-gate / math.sqrt(2)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate * sigmoid(2 * inner) * up  # 0.5 (1 + tanh(y)) = sigmoid(2 y)


class Layer(NamedTuple):
    """The weights of E experts before packing, numpy."""

    w13: QuantizedTensor
    w2: QuantizedTensor
    w13_bias: np.ndarray | None = None
    w2_bias: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, H, I."""
        return self.w2.shape  # type: ignore[return-value]

    def packed(self, interleaved: bool = False) -> w4a8.ExpertWeights:
        return on_device(w4a8.pack_experts(*self, interleaved=interleaved))


class Result(NamedTuple):
    """What must come out, and by how much it may differ where a rounding to INT8 was close to a tie."""

    value: np.ndarray
    slack: np.ndarray


def one(weights: QuantizedTensor, expert: int) -> QuantizedTensor:
    return QuantizedTensor(weights.codes[expert], weights.scale[expert], weights.group_size)


def run_expert(x: np.ndarray, layer: Layer, expert: int, activation: str | Activation, scheme: str) -> Result:
    """One expert on float32 rows ``[M, H]``."""
    w13, w2 = one(layer.w13, expert), one(layer.w2, expert)
    b13 = None if layer.w13_bias is None else layer.w13_bias[expert]
    b2 = None if layer.w2_bias is None else layer.w2_bias[expert]
    hidden = linear(x, w13, b13, scheme)
    gate, up = np.split(hidden, 2, axis=1)
    rows = quantize_rows(activate(gate, up, activation).astype(np.float32), scheme)
    distance = np.abs(rows.scaled - np.floor(rows.scaled) - 0.5)
    fragile = (distance < FRAGILE) & (rows.scale[:, None] > 0)
    slack = (fragile * rows.scale[:, None]) @ np.abs(dequantized(w2)).T
    return Result(multiply(rows, w2, b2), slack)


def apply_experts(
    x: np.ndarray,
    ids: np.ndarray,
    layer: Layer,
    activation: str | Activation = "silu",
    scheme: str = SCHEMES[0],
) -> Result:
    """Every slot's output, float64 ``[T, k, H]``; zeros for id -1."""
    value = np.zeros((*ids.shape, x.shape[1]))
    slack = np.zeros_like(value)
    for expert in range(layer.shape[0]):
        token, slot = np.nonzero(ids == expert)
        found = run_expert(x[token], layer, expert, activation, scheme)
        value[token, slot], slack[token, slot] = found
    return Result(value, slack)


def fused_experts(
    x: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    layer: Layer,
    activation: str | Activation = "silu",
    scheme: str = SCHEMES[0],
    on_input: bool = False,
) -> Result:
    """The expert call, float64 ``[T, H]``. ``x`` is float32."""
    if on_input:
        x, weights = x * weights.astype(np.float32), np.ones_like(weights)
    slots = apply_experts(x, ids, layer, activation, scheme)
    factors = np.where(ids < 0, 0, weights.astype(np.float64))[..., None]
    return Result((slots.value * factors).sum(1), (slots.slack * np.abs(factors)).sum(1))


def unquantized_experts(
    x: np.ndarray,
    weights: np.ndarray,
    ids: np.ndarray,
    layer: Layer,
    activation: str = "silu",
    on_input: bool = False,
) -> np.ndarray:
    """Dequantised weights on activations that nobody quantised, float64 ``[T, H]``."""
    w13, w2 = dequantized(layer.w13), dequantized(layer.w2)
    y = np.zeros(x.shape)
    for token, slot in np.ndindex(*ids.shape):
        expert, weight = ids[token, slot], float(weights[token, slot])
        row = x[token].astype(np.float64) * (weight if on_input else 1)
        hidden = w13[expert] @ row
        hidden += 0 if layer.w13_bias is None else layer.w13_bias[expert]
        out = w2[expert] @ activate(*np.split(hidden, 2), activation)
        out += 0 if layer.w2_bias is None else layer.w2_bias[expert]
        y[token] += out * (1 if on_input else weight)
    return y


# ---------------------------------------------------------------------------------------------------------
# Inputs.


def on_device(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def random_weights(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    group_size: int = 32,
    scale_dtype: Any = np.float32,
    magnitude: float | None = None,
) -> QuantizedTensor:
    """All codes, scales of both signs; a product has about the magnitude of its input."""
    k = shape[-1]
    groups = 1 if group_size == -1 else math.ceil(k / group_size)
    magnitude = 0.2 / math.sqrt(k) if magnitude is None else magnitude
    scale = rng.uniform(0.5, 1.5, (*shape[:-1], groups)) * magnitude
    scale *= rng.choice([-1, 1], scale.shape)
    codes = rng.integers(-8, 8, shape).astype(np.int8)
    return QuantizedTensor(codes, scale.astype(scale_dtype), group_size)


def random_layer(
    seed: int = 0,
    experts: int = 4,
    hidden: int = 64,
    inner: int = 96,
    group_size: int = 32,
    scale_dtype: Any = np.float32,
    biased: bool = False,
    magnitude: float | None = None,
) -> Layer:
    rng = np.random.default_rng(seed)
    w13 = random_weights(rng, (experts, 2 * inner, hidden), group_size, scale_dtype, magnitude)
    w2 = random_weights(rng, (experts, hidden, inner), group_size, scale_dtype, magnitude)
    if not biased:
        return Layer(w13, w2)
    b13 = rng.normal(size=(experts, 2 * inner)).astype(np.float32)
    return Layer(w13, w2, b13, rng.normal(size=(experts, hidden)).astype(np.float32))


class Batch(NamedTuple):
    """Tokens with their routing, numpy."""

    x: np.ndarray
    weights: np.ndarray
    ids: np.ndarray


def random_batch(
    tokens: int = 9,
    hidden: int = 64,
    experts: int = 4,
    top_k: int = 2,
    dtype: Any = np.float32,
    seed: int = 1,
) -> Batch:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, hidden)) + rng.normal(size=(tokens, 1))
    weights = rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32)
    ids = rng.integers(0, experts, (tokens, top_k)).astype(np.int32)
    return Batch(x.astype(jnp.dtype(dtype)), weights, ids)


# ---------------------------------------------------------------------------------------------------------
# Comparisons.

_STATIC = ("activation", "activation_scheme", "apply_router_weight_on_input", "backend")
#: Shared by all tests: the pure-JAX backend takes a second or two to compile.
compiled = types.SimpleNamespace(
    fused_experts=jax.jit(w4a8.fused_experts, static_argnames=_STATIC),
    apply_experts=jax.jit(w4a8.apply_experts, static_argnames=_STATIC),
    linear=jax.jit(w4a8.linear, static_argnames=("activation_scheme", "backend")),
    combine=jax.jit(w4a8.combine, static_argnames=("dtype", "backend")),
)


def bits(x: Any) -> np.ndarray:
    """The representation, so that NaN equals itself and 0 is not -0."""
    array = np.ascontiguousarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(a: Any, b: Any, message: str = "") -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape), message
    np.testing.assert_array_equal(bits(a), bits(b), message)


def relative_error(actual: Any, expected: np.ndarray) -> float:
    difference = np.asarray(actual).astype(np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def assert_rows_close(actual: Any, expected: Result | np.ndarray, tolerance: float) -> None:
    """Relative L2 per row, beside the slack and the one rounding to the dtype of ``actual``."""
    value, slack = expected if isinstance(expected, Result) else (expected, 0)
    actual = np.asarray(actual)
    assert actual.shape == value.shape
    slack = slack + ROUNDING[actual.dtype.name] * np.abs(value)
    excess = np.maximum(np.abs(actual.astype(np.float64) - value) - slack, 0)
    error = np.linalg.norm(excess, axis=-1) / np.maximum(np.linalg.norm(value, axis=-1), 1e-30)
    assert (error <= tolerance).all(), f"relative errors by row {error}"


# ---------------------------------------------------------------------------------------------------------
# Processes.

ROOT = Path(__file__).parent.parent


def in_process(function: Callable[[], None], timeout: float = 120, **environment: str) -> str:
    """Runs a function of a test module in a process of its own; returns what it prints."""
    module = f"{Path(__file__).parent.name}.{function.__module__.rpartition('.')[2]}"
    code = f"from {module} import {function.__name__} as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
