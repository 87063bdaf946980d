"""A progress bar for loading; silent where there is no terminal, or no ``rich`` to draw with."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

#: Called with the bytes that were just read.
Progress = Callable[[int], None]


@contextlib.contextmanager
def loading_progress(
    progress: bool | Callable[[int, int], None] | None, total: int, label: str = "Loading"
) -> Iterator[Progress]:
    """Gives a function that takes the bytes just read.

    Args:
      progress: True for a bar on standard error, False for none, None for one if that is a terminal, or a
        function of bytes read so far and bytes in all.
      total: bytes in all.
      label: what the bar is called.
    """
    if progress is None:
        progress = sys.stderr.isatty()
    if callable(progress):
        yield _running_total(progress, total)
        return
    rich = _import_rich() if progress else None
    if rich is None:
        yield lambda nbytes: None
        return
    with rich.Progress(
        rich.TextColumn(label),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        console=_console(),
        transient=True,
    ) as bar:
        task = bar.add_task("load", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def _running_total(report: Callable[[int, int], None], total: int) -> Progress:
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report(done, total)

    return advance


def _import_rich() -> Any:
    try:
        import rich.progress as module
    except ImportError:
        return None
    return module


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)
