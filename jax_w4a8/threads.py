"""How many threads this process may use, and calls spread over that many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

try:
    from jax_w4a8 import _native
except ImportError:
    _native = None  # type: ignore[assignment]

Result = TypeVar("Result")


def num_threads() -> int:
    """Threads of XLA's intra-op pool, as its own rule computes them: ``NPROC``, else the CPU affinity."""
    for variable in ("PJRT_NPROC", "NPROC"):
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_threads() -> int:
    """:func:`num_threads`, or fewer inside :func:`jax_w4a8.thread_limit`."""
    limit = _native.thread_limit() if hasattr(_native, "thread_limit") else 0
    return min(num_threads(), limit) if limit else num_threads()


class Workers:
    """Threads for calls that release the interpreter's lock. They end with the ``with`` block."""

    def __init__(self, threads: int | None = None) -> None:
        """Without ``threads``, as many as this process may use; 1 runs calls on the calling thread."""
        threads = usable_threads() if threads is None else threads
        self._pool = ThreadPoolExecutor(threads, "jax_w4a8") if threads > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, calls: Iterable[Callable[[], Result]]) -> list[Result]:
        """The calls' results, in their order; the first exception is raised once all have ended."""
        if self._pool is None:
            return [call() for call in calls]
        futures = [self._pool.submit(call) for call in calls]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]
