"""Several processes as one: joining them, and starting them all on one machine.

Processes talk through ``jax.distributed`` and JAX's own collectives for CPUs (Gloo, over TCP). A process that
is lost ends the others with an error: at once where they wait for it in a collective, else after
:data:`HEARTBEAT_SECONDS` without a sign of life.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

import jax

from jax_w4a8 import ffi

HEARTBEAT_SECONDS = 20
#: How long processes may wait for each other to start.
START_SECONDS = 300
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """One process among several.

    Attributes:
      coordinator: ``HOST:PORT`` of process 0, which all others can reach.
      num_processes: how many there are.
      process_id: this one's number, from 0.

    Raises:
      ValueError: the numbers don't fit.
    """

    coordinator: str
    num_processes: int
    process_id: int

    def __post_init__(self) -> None:
        _check_count(self.num_processes)
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id must lie in [0, {self.num_processes}), the number of processes, "
                f"got {self.process_id}"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"coordinator must be HOST:PORT, got {self.coordinator!r}")


def _check_count(num_processes: int) -> None:
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")


@contextlib.contextmanager
def membership(group: ProcessGroup) -> Iterator[None]:
    """Makes this process one of a group inside a ``with`` block, before JAX is used for anything else.

    What libraries write to standard output goes to standard error meanwhile; ``print`` is left alone. An
    exception ends the process, with one line on standard error and exit code 2: waiting for the others, as
    an orderly exit does, would be waiting for a process that may be gone.
    """
    _keep_standard_output()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.num_processes,
            group.process_id,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
        yield
        sys.stdout.flush()
        jax.distributed.shutdown()
    except Exception as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(2)


def _keep_standard_output() -> None:
    """Gloo reports its connections on file descriptor 1, where text and JSON are expected."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", encoding="utf-8")


class _Child:
    def __init__(self, command: Sequence[str], process_id: int, threads: int) -> None:
        self.process_id = process_id
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        environment = {"NPROC": str(threads), **os.environ}
        self._process = subprocess.Popen(
            [*command, "--process-id", str(process_id)],
            stdout=None if process_id == 0 else subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
        )

    def returncode(self) -> int | None:
        return self._process.poll()

    def failure(self, num_processes: int) -> str:
        """One line about how it ended: its own message if it left one."""
        code = self.returncode() or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
        where = f"process {self.process_id} of {num_processes} ended with {how}"
        return f"{where}: {said.removeprefix('error: ')}" if said else where

    def stop(self) -> None:
        if self.returncode() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()


def launch(command: Sequence[str], num_processes: int) -> None:
    """Runs a command as ``num_processes`` processes on this machine, until all have ended.

    Each gets ``--coordinator`` and ``--process-id`` added, and, unless ``NPROC`` is set, its share of the
    machine's threads. Process 0 writes to this process's standard output; the others' is dropped.

    Raises:
      ValueError: ``num_processes`` is below 1.
      RuntimeError: a process failed; the message is its own. The others have been ended.
    """
    _check_count(num_processes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    full = [*command, "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(num_processes)]
    threads = max(1, ffi.num_threads() // num_processes)
    children: list[_Child] = []
    try:
        children.extend(_Child(full, i, threads) for i in range(num_processes))
        while any(child.returncode() is None for child in children):
            _raise_failure(children)
            time.sleep(_POLL_SECONDS)
        _raise_failure(children)
    finally:
        for child in children:
            child.stop()


def _raise_failure(children: Sequence[_Child]) -> None:
    failed = [child for child in children if child.returncode()]
    if failed:
        raise RuntimeError(failed[0].failure(len(children)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--distributed`` and what belongs to it."""
    group = parser.add_argument_group("many processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="spread the experts over processes: as many as --num-processes, started here, or, with "
        "--coordinator and --process-id, this one among those started elsewhere",
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="default: 2")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    group.add_argument("--process-id", type=int, metavar="I", help="this process's number, from 0")


def asked_group(arguments: argparse.Namespace) -> ProcessGroup | None:
    """The group that arguments name; None when there is none to join, as without ``--distributed``.

    Raises:
      ValueError: arguments lack each other.
    """
    given = (arguments.coordinator is not None, arguments.process_id is not None)
    if not arguments.distributed:
        if any(given) or arguments.num_processes is not None:
            raise ValueError("--num-processes, --coordinator and --process-id need --distributed")
        return None
    if not any(given):
        return None
    if not all(given) or arguments.num_processes is None:
        raise ValueError("--coordinator, --process-id and --num-processes must be given together")
    return ProcessGroup(arguments.coordinator, arguments.num_processes, arguments.process_id)
