"""Writes the few figures that the project's README quotes from recorded runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page import read_records, table
from targets import OURS, model_ratios, ratios

#: What lies between the two is written here.
BEGIN, END = "<!-- figures: written by record.py -->", "<!-- end of figures -->"
TOKENS = (1, 16, 64, 256, 1024)
LAYER, MODEL = "qwen3-g128", "model-llamacpp-best"
SETS = ("avx512_vnni", "amx_int8")
PEERS = {
    "peer-llamacpp": "llama.cpp, fastest of Q4_0 and Q4_K (g 32)",
    "peer-zentorch": "zentorch W4A8 (g 128)",
    "peer-onnxruntime-g128": "ONNX Runtime QMoE (g 128)",
    "pure-jax": "the best pure JAX found",
}


def write_summary(readme: Path, results: Path) -> None:
    """Replaces what lies between the marks; leaves all as it is where a run that it takes is missing."""
    records = read_records(results)
    if not {LAYER, MODEL, *PEERS} <= set(records):
        return
    replace_figures(readme, [_layer(records[LAYER]), _peers(records), [_model(records[MODEL])]])


def replace_figures(page: Path, parts: Sequence[Sequence[str]]) -> None:
    """Writes parts, each of some lines, between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    lines = [BEGIN, "", *(line for part in parts for line in (*part, "")), END]
    page.write_text(before + "\n".join(lines) + rest.split(END)[1])


def _layer(record: Mapping[str, Any]) -> list[str]:
    rows = {
        (row["tokens"], row["variant"]): row
        for row in record["results"]
        if row["implementation"] == OURS and row["routing"] == "uniform"
    }
    header = ["tokens", *(cell for name in SETS for cell in (f"`{name}`", ""))]
    return table(header, [[str(n), *(c for name in SETS for c in _cells(rows[n, name]))] for n in TOKENS], 1)


def _cells(row: Mapping[str, Any]) -> tuple[str, str]:
    bound = "read bandwidth" if row["bound"] == "memory" else "the dot products' peak"
    time = f"{row['milliseconds']:#.3g}".rstrip(".")
    return f"{time} ms", f"{100 * row['share_of_bound']:.0f} % of {bound}"


def _peers(records: Mapping[str, Any]) -> list[str]:
    rows = [
        [what, *(f"{max(ratios(records[name], tokens).values()):.1f}x" for tokens in TOKENS)]
        for name, what in PEERS.items()
    ]
    return table(["ours is faster than, by", *map(str, TOKENS)], rows, 1)


def _model(record: Mapping[str, Any]) -> str:
    decode, prefill = (model_ratios(record, key) for key in ("decode_rate", "prefill_rate"))
    case = record["model"]
    return (
        f"{case['layers']} layers as a whole model: llama.cpp takes {decode:.1f} times as long for a token "
        f"and {prefill:.1f} times for a prompt of {case['prompt_tokens']}."
    )
