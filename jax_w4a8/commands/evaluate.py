"""The ``eval`` subcommand: perplexity of a text under W4A8, and what quantisation has to do with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_w4a8.experts.base import ACTIVATION_SCHEMES

if TYPE_CHECKING:
    from jax_w4a8.models import Decoder, Perplexity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommand's arguments."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a W4A8 checkpoint; default: the shipped model"
    )
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to predict")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens per window (default: up to 2048)")
    parser.add_argument(
        "--stride", type=int, metavar="N", help="tokens between windows (default: half of one)"
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="windows at once")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="score the text's first N tokens alone")
    parser.add_argument("--activation-scheme", choices=ACTIVATION_SCHEMES, default="asymmetric")
    parser.add_argument(
        "--weights-only", action="store_true", help="also with the same weights and activations in float32"
    )
    parser.add_argument("--float", type=Path, metavar="DIR", help="also the checkpoint before quantisation")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
      CheckpointError, ValueError, OSError: an argument, the text or a checkpoint can't be used.
      ImportError: a package that models need is missing.
    """
    from jax_w4a8.models import default_model_path, load_model
    from jax_w4a8.models.text import load_tokenizer

    path = default_model_path() if arguments.model is None else arguments.model
    text = _read_text(arguments.text)
    ids, text_bytes = _encode(load_tokenizer(path), text, arguments.max_tokens)
    model = load_model(path, arguments.activation_scheme)
    results = {"w4a8": _evaluate("W4A8", model, ids, text_bytes, arguments)}
    if arguments.weights_only:
        wide = model.with_float_activations()
        results["w4a16"] = _evaluate("float activations", wide, ids, text_bytes, arguments)
    del model
    if arguments.float is not None:
        original = load_model(arguments.float, allow_float=True)
        results["float"] = _evaluate("float", original, ids, text_bytes, arguments)
    report = _report(results, arguments)
    print(json.dumps(report) if arguments.json else "\n".join(_lines(report)))
    return 0


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {file} is no UTF-8 text: {error}") from error


def _encode(
    tokenizer: Any, text: str, max_tokens: int | None
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], int]:
    """Ids, and the bytes of the text that they stand for."""
    encoding = tokenizer.encode(text)
    if max_tokens is None or max_tokens >= len(encoding.ids):
        return np.array(encoding.ids, np.int32), len(text.encode())
    if max_tokens < 2:
        raise ValueError(f"--max-tokens must be at least 2, got {max_tokens}")
    end = max(stop for _, stop in encoding.offsets[:max_tokens])
    return np.array(encoding.ids[:max_tokens], np.int32), len(text[:end].encode())


def _evaluate(
    label: str,
    model: Decoder,
    ids: np.ndarray[Any, np.dtype[np.int32]],
    text_bytes: int,
    arguments: argparse.Namespace,
) -> Perplexity:
    from jax_w4a8.models import perplexity

    with _bar(label) as progress:
        return perplexity(
            model,
            ids,
            max_length=arguments.max_length,
            stride=arguments.stride,
            batch_size=arguments.batch_size,
            text_bytes=text_bytes,
            progress=progress,
        )


@contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, if that is a terminal and ``rich`` is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda done, total: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _report(results: dict[str, Perplexity], arguments: argparse.Namespace) -> dict[str, Any]:
    first = results["w4a8"]
    report: dict[str, Any] = {
        "tokens": first.tokens,
        "text_bytes": first.text_bytes,
        "max_length": first.max_length,
        "stride": first.stride,
        "activation_scheme": arguments.activation_scheme,
    }
    for name, result in results.items():
        report[name] = {
            "perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
            "nll_per_token": result.nll / result.tokens,
        }
    return report


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{report['tokens']} tokens, windows of {report['max_length']}, stride {report['stride']}, "
        f"{report['activation_scheme']} activations"
    )
    names = {"w4a8": "W4A8", "w4a16": "same weights, float activations", "float": "float checkpoint"}
    best = report[[name for name in names if name in report][-1]]["perplexity"]
    for name, label in names.items():
        if name in report:
            value = report[name]
            excess = f"{100 * (value['perplexity'] / best - 1):+.2f} %"
            yield (
                f"{label:32} perplexity {value['perplexity']:9.4f}  {excess:>9}  "
                f"bits per byte {value['bits_per_byte']:.4f}"
            )
