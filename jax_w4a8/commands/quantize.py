"""The ``quantize`` subcommand: a floating point checkpoint in, a compressed-tensors W4A8 checkpoint out."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the subcommand's arguments."""
    parser.add_argument("source", type=Path, metavar="SRC", help="a floating point Hugging Face directory")
    parser.add_argument(
        "destination", type=Path, metavar="DST", help="a new directory, or that of a run that was ended"
    )
    parser.add_argument(
        "--group-size", type=int, default=128, metavar="N", help="inputs per scale; -1 for channel-wise"
    )
    parser.add_argument(
        "--format", choices=("pack", "int"), default="pack", help="eight codes per word, or one per byte"
    )
    parser.add_argument(
        "--scale",
        choices=("absmax", "mse"),
        default="absmax",
        help="by largest magnitude (fast), or by least squared error",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="further modules to leave in floating point: names, or expressions after 're:'",
    )
    parser.add_argument(
        "--shard-size", type=float, default=2.0, metavar="GIB", help="largest file, in GiB (default 2)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
      ImportError: a package that models need is missing.
      CheckpointError, ValueError, OSError: as :func:`jax_w4a8.checkpoint.quantizer.quantize_checkpoint`.
    """
    try:
        from jax_w4a8.checkpoint.quantizer import QuantizeOptions, quantize_checkpoint
    except ImportError as error:
        raise ImportError(
            f"{error}; quantising needs more packages: pip install 'jax_w4a8[models]'"
        ) from error
    if not 0 < arguments.shard_size < 1 << 20:
        raise ValueError(f"--shard-size must be a positive number of GiB, got {arguments.shard_size}")
    options = QuantizeOptions(
        arguments.group_size,
        arguments.format,
        arguments.scale,
        tuple(arguments.ignore),
        max(1, int(arguments.shard_size * 2**30)),
    )
    with _progress() as advance:
        report = quantize_checkpoint(arguments.source, arguments.destination, options, advance)
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.table())
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, which starts when the total is known."""
    from jax_w4a8.models.progress import Progress, loading_progress

    with contextlib.ExitStack() as stack:
        advance: Progress | None = None
        before = 0

        def report(done: int, total: int) -> None:
            nonlocal advance, before
            if advance is None:
                advance = stack.enter_context(loading_progress(None, total, "Quantising"))
            advance(done - before)
            before = done

        yield report
