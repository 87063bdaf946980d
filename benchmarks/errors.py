"""How far W4A8 is from the float layer, and which part of that is whose.

    python benchmarks/errors.py           # measures, draws, and writes docs/errors.md's tables
    python benchmarks/errors.py --page    # only draws and writes, from results/errors.json

Errors are relative: the norm of the difference to the float64 result over all tokens, over that result's
norm. Weights and tokens are normal; a matrix of K inputs is divided by the root of K, so that magnitudes stay
what they are. The *weights'* part is the error of the dequantised weights on float64 activations; the
*activations'* part is the difference between what the kernels give and that. Everything is repeated with
other seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from errors_plot import PARTS, STUDIES, draw
from scipy.special import expit, ndtr

import jax_w4a8 as w4a8
from jax_w4a8.experts.base import ACTIVATION_SCHEMES, ACTIVATIONS

RESULT = Path(__file__).parent / "results" / "errors.json"
PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
SEEDS = 5
TOKENS, HIDDEN, INNER, OUT = 32, 1024, 512, 256
GROUP_SIZES = (32, 64, 128, 256, -1)
OUTLIERS = (1, 3, 10, 30, 100, 300, 1000)
INPUTS = (128, 512, 2048, 8192)
Matrix = np.ndarray[Any, np.dtype[np.float64]]

_layer = jax.jit(w4a8.fused_experts, static_argnames=("activation", "activation_scheme"))
_linear = jax.jit(w4a8.linear, static_argnames="activation_scheme")


def gated(gate: Matrix, up: Matrix, kind: str) -> Matrix:
    """The activations of :class:`jax_w4a8.Activation` in float64, with its default parameters."""
    if kind == "silu":
        return gate * expit(gate) * up
    if kind == "gelu":
        return gate * ndtr(gate) * up
    if kind == "gelu_tanh":
        return gate * expit(2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)) * up
    defaults = w4a8.Activation(kind)
    gate, up = np.minimum(gate, defaults.limit), np.clip(up, -defaults.limit, defaults.limit)
    return (up + 1) * gate * expit(defaults.alpha * gate)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return rng.standard_normal(shape, np.float32)


def _weights(rng: np.random.Generator, rows: int, inputs: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return _normal(rng, rows, inputs) / np.float32(np.sqrt(inputs))


def _parts(exact: Matrix, weights_only: Matrix, found: Any) -> dict[str, float]:
    """The relative errors, in the order of PARTS."""
    found, size = np.asarray(found, np.float64), np.linalg.norm(exact)
    differences = (found - exact, weights_only - exact, found - weights_only)
    return {part: float(np.linalg.norm(error) / size) for part, error in zip(PARTS, differences, strict=True)}


def expert_errors(seed: int, group_size: int, activation: str) -> dict[str, dict[str, float]]:
    """One expert's errors by activation scheme."""
    rng = np.random.default_rng(seed)
    x = _normal(rng, TOKENS, HIDDEN)
    w13, w2 = _weights(rng, 2 * INNER, HIDDEN), _weights(rng, HIDDEN, INNER)
    quantized = [w4a8.quantize(w, group_size) for w in (w13, w2)]

    def expert(first: Any, second: Any) -> Matrix:
        first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
        return gated(*np.split(x @ first.T, 2, axis=1), activation) @ second.T

    packed = w4a8.pack_experts(*(jax.tree.map(lambda leaf: leaf[None], q) for q in quantized))
    chosen = np.ones((TOKENS, 1), np.float32), np.zeros((TOKENS, 1), np.int32)
    exact, weights_only = expert(w13, w2), expert(*(q.dequantize() for q in quantized))
    return {
        scheme: _parts(
            exact, weights_only, _layer(x, *chosen, packed, activation=activation, activation_scheme=scheme)
        )
        for scheme in ACTIVATION_SCHEMES
    }


def linear_errors(seed: int, group_size: int, inputs: int, outlier: float) -> dict[str, dict[str, float]]:
    """A linear map's errors by activation scheme; a channel of the tokens is ``outlier`` times the rest."""
    rng = np.random.default_rng(seed)
    x, w = _normal(rng, TOKENS, inputs), _weights(rng, OUT, inputs)
    x[:, inputs // 3] *= np.float32(outlier)
    quantized = w4a8.quantize(w, group_size)
    packed = w4a8.pack_linear(quantized)
    wide = x.astype(np.float64)
    exact, weights_only = wide @ w.T, wide @ np.asarray(quantized.dequantize(), np.float64).T
    return {
        scheme: _parts(exact, weights_only, _linear(x, packed, activation_scheme=scheme))
        for scheme in ACTIVATION_SCHEMES
    }


def cases() -> Iterator[tuple[str, dict[str, Any], Callable[[int], dict[str, dict[str, float]]]]]:
    """The study of each case, its settings, and what measures it for a seed."""
    for size in GROUP_SIZES:
        yield (
            "groups",
            {"group_size": size},
            functools.partial(expert_errors, group_size=size, activation="silu"),
        )
    for kind in ACTIVATIONS:
        yield (
            "activations",
            {"activation": kind},
            functools.partial(expert_errors, group_size=128, activation=kind),
        )
    for outlier in OUTLIERS:
        yield (
            "outliers",
            {"outlier": outlier},
            functools.partial(linear_errors, group_size=128, inputs=HIDDEN, outlier=outlier),
        )
    for inputs in INPUTS:
        for size in (128, -1):
            yield (
                "inputs",
                {"inputs": inputs, "group_size": size},
                functools.partial(linear_errors, group_size=size, inputs=inputs, outlier=1),
            )


def measure() -> dict[str, Any]:
    """All cases: the median, lowest and highest error over the seeds."""
    rows = []
    for study, settings, errors in cases():
        found = [errors(seed) for seed in range(SEEDS)]
        for scheme in ACTIVATION_SCHEMES:
            row: dict[str, Any] = {"study": study, **settings, "scheme": scheme}
            for part in PARTS:
                values = sorted(one[scheme][part] for one in found)
                row[part] = {"median": statistics.median(values), "low": values[0], "high": values[-1]}
            rows.append(row)
        print(study, settings, f"{rows[-2]['total']['median']:.4f}", flush=True)
    return {
        "command": "python benchmarks/errors.py",
        "seeds": SEEDS,
        "tokens": TOKENS,
        "expert": f"H {HIDDEN}, I {INNER}",
        "linear": f"{OUT} outputs, K {HIDDEN} unless said",
        "jax": jax.__version__,
        "backend": "cpu_int4",
        "results": rows,
    }


def _percent(error: dict[str, float]) -> str:
    return f"{error['median']:.2%} ({error['low']:.2%} to {error['high']:.2%})"


def table(study: str, rows: list[dict[str, Any]]) -> str:
    """A study's medians with their ranges."""
    mine = [row for row in rows if row["study"] == study]
    settings = [key for key in mine[0] if key not in ("study", "scheme", *PARTS)]
    header = [*(STUDIES[study].names.get(key, key) for key in settings), "scheme", *PARTS]
    lines = [header, ["---"] * len(header)]
    for row in mine:
        shown = [("channel-wise" if row[key] == -1 else f"{row[key]}") for key in settings]
        lines.append([*shown, row["scheme"], *(_percent(row[part]) for part in PARTS)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_page(record: dict[str, Any]) -> None:
    """Replaces what stands between each study's marks."""
    text = PAGE.read_text()
    for study in STUDIES:
        begin, end = f"<!-- {study}: written by benchmarks/errors.py -->", f"<!-- end of {study} -->"
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n\n{table(study, record['results'])}\n\n{end}{after}"
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", action="store_true", help="only draw and write, from the recorded results")
    if not parser.parse_args().page:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    record = json.loads(RESULT.read_text())
    draw(record, PAGE.parent / "errors")
    write_page(record)


if __name__ == "__main__":
    main()
