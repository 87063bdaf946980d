"""What the quantiser costs a model: perplexity by group size and by how scales are found.

    python benchmarks/quantizers.py FLOAT_DIR TEXT_FILE [--tokens 4096] [--json FILE]

Quantises FLOAT_DIR eight times into a temporary directory and prints a table: relative error of the weights,
and perplexity over the text in windows that don't overlap, weights alone and with INT8 activations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_w4a8.checkpoint.quantizer import QuantizeOptions, quantize_checkpoint
from jax_w4a8.models import Decoder, load_model
from jax_w4a8.models.text import load_tokenizer

GROUP_SIZES = (32, 64, 128, -1)
SCALES = ("absmax", "mse")


def windows(directory: Path, text: Path, tokens: int, window: int) -> np.ndarray[Any, Any]:
    """int32 ``[n, window]``."""
    ids = load_tokenizer(directory).encode(text.read_text(encoding="utf-8")).ids
    count = min(tokens, len(ids)) // window
    if count < 1:
        raise SystemExit(f"{text} has {len(ids)} tokens, fewer than a window of {window}")
    return np.asarray(ids[: count * window], np.int32).reshape(count, window)


@jax.jit
def _surprise(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Negative log likelihood of every token but the first of each row, summed."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), token_ids[:, 1:, None], axis=-1)
    return -chosen.sum()


def perplexity(model: Decoder, batches: np.ndarray[Any, Any]) -> float:
    """Of tokens that have at least one before them in their window."""
    total = sum(float(_surprise(model(row[None]), row[None])) for row in batches)
    return float(np.exp(total / (batches.size - len(batches))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    batches = windows(arguments.model, arguments.text, arguments.tokens, arguments.window)
    exact = perplexity(load_model(arguments.model, allow_float=True), batches)
    print(f"{batches.size} tokens in windows of {arguments.window}; floating point: perplexity {exact:.4f}\n")
    print("| group size | scale | weight error | perplexity | more than float | symmetric activations |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = []
    for group_size in GROUP_SIZES:
        for scale in SCALES:
            with tempfile.TemporaryDirectory() as directory:
                report = quantize_checkpoint(
                    arguments.model, directory, QuantizeOptions(group_size, scale=scale)
                )
                found = {
                    s: perplexity(load_model(directory, s), batches) for s in ("asymmetric", "symmetric")
                }
            row = {"group_size": group_size, "scale": scale, "error": report.relative_error, **found}
            rows.append(row)
            name = "channel" if group_size < 0 else str(group_size)
            print(
                f"| {name} | {scale} | {100 * report.relative_error:.2f} % | {found['asymmetric']:.4f} | "
                f"{100 * (found['asymmetric'] / exact - 1):+.2f} % | {found['symmetric']:.4f} |",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"float": exact, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
