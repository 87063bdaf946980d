"""The native extension: registration of its custom calls, the ABI guard, its settings.

Importing this module registers the custom calls, unless the extension is missing or was compiled with newer
FFI headers than the running jaxlib's: XLA refuses such a handler by taking the whole CPU backend down, so it
must not even be offered. :func:`unavailable_reason` says which; the pure-JAX backend works regardless.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_w4a8.threads import num_threads as num_threads
from jax_w4a8.weights import LAYOUT_VERSION

try:
    import jax_w4a8._native as _native
except ImportError as error:
    _native = None  # type: ignore[assignment]
    _import_error: str | None = str(error)
else:
    _import_error = None

logger = logging.getLogger("jax_w4a8")

#: Names the instruction set to use, where it is usable; see :func:`set_instruction_set`.
INSTRUCTION_SET_VARIABLE = "JAX_W4A8_INSTRUCTION_SET"

#: Pass to ``jax.export.export(..., disabled_checks=DISABLE_JAX_EXPORT_CHECKS)``: the custom calls' names
#: carry their version, which is the compatibility guarantee that the check asks for.
DISABLE_JAX_EXPORT_CHECKS: list[jax.export.DisabledSafetyCheck] = []

_TARGETS: dict[str, str] = {
    operation: f"jax_w4a8_{operation}_v{LAYOUT_VERSION}"
    for operation in ("fused_experts", "apply_experts", "combine", "linear", "grouped_linear", "attend")
}


def runtime_ffi_version(header: str | Path | None = None) -> tuple[int, int]:
    """(major, minor) of the FFI that the running jaxlib speaks, read from its ``c_api.h``."""
    if header is None:
        header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = Path(header).read_text()
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(match.group(1)) if match else 0 for match in found)
    return major, minor


def incompatibility(compiled: tuple[int, int], runtime: tuple[int, int]) -> str | None:
    """Why handlers of FFI version ``compiled`` must not be registered with ``runtime``, or None."""
    if compiled[0] == runtime[0] and compiled[1] <= runtime[1]:
        return None
    return (
        f"the extension was compiled for XLA FFI {compiled[0]}.{compiled[1]}, and this jaxlib has "
        f"{runtime[0]}.{runtime[1]}: install a newer jaxlib or rebuild against this one"
    )


def _register() -> str | None:
    """Registers the custom calls; returns why it couldn't."""
    if _native is None:
        return f"the native extension can't be imported ({_import_error})"
    reason = incompatibility(_native.ffi_version(), runtime_ffi_version())
    if reason is not None:
        return reason
    for operation, capsule in _native.registrations().items():
        target = _TARGETS[operation]
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
        DISABLE_JAX_EXPORT_CHECKS.append(jax.export.DisabledSafetyCheck.custom_call(target))
    _check_environment()
    return None


def _check_environment() -> None:
    asked = os.environ.get(INSTRUCTION_SET_VARIABLE)
    if asked and asked not in _native.instruction_sets():
        raise ValueError(
            f"{INSTRUCTION_SET_VARIABLE} must be one of {_native.instruction_sets()} on this machine, "
            f"got {asked!r}"
        )


_reason = _register()
if _reason is not None:
    logger.warning("jax_w4a8 runs in pure JAX: %s", _reason)


def unavailable_reason() -> str | None:
    """Why the native backend can't be used in this process, or None."""
    return _reason


def native_available() -> bool:
    """Whether the native backend can be used in this process (on CPU)."""
    return _reason is None


def _require_native() -> None:
    if _reason is not None:
        raise RuntimeError(f"the native backend is not available: {_reason}")


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets usable on this machine, best first; empty without the native backend."""
    return tuple(_native.instruction_sets()) if native_available() else ()


def instruction_set() -> str | None:
    """The instruction set that kernels run with from now on; None without the native backend."""
    return _native.instruction_set() if native_available() else None


def set_instruction_set(name: str) -> None:
    """Forces an instruction set, for programs already compiled too; results don't change, bit for bit.

    The environment variable ``JAX_W4A8_INSTRUCTION_SET`` does the same from the start of the process.

    Raises:
      RuntimeError: there is no native backend here.
      ValueError: this machine can't run ``name``, or there is no such instruction set.
    """
    _require_native()
    if not _native.force_instruction_set(name):
        raise ValueError(
            f"instruction set must be one of {list(instruction_sets())} on this machine, got {name!r}"
        )


@contextlib.contextmanager
def using_instruction_set(name: str) -> Iterator[None]:
    """Forces an instruction set inside a ``with`` block; see :func:`set_instruction_set`.

    JAX's calls return before they run: what isn't waited for inside the block may run behind it.
    """
    before = instruction_set()
    set_instruction_set(name)
    try:
        yield
    finally:
        set_instruction_set(before or name)


@contextlib.contextmanager
def thread_limit(limit: int) -> Iterator[None]:
    """Lets calls inside the block use at most ``limit`` threads of XLA's pool, the calling one included.

    Results don't change, bit for bit. The size of the pool itself is set by the environment variable
    ``NPROC`` or by the process's CPU affinity before JAX starts.

    Raises:
      RuntimeError: there is no native backend here.
      ValueError: ``limit`` is below 1.
    """
    _require_native()
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    before = _native.thread_limit()
    _native.set_thread_limit(limit)
    try:
        yield
    finally:
        _native.set_thread_limit(before)


_first_use: int | None = None  # process id


def check_process() -> None:
    """Raises RuntimeError in a process that was forked from one that had used this package.

    JAX's threads don't survive a fork: what is compiled already may run, and compiling more never ends.
    """
    global _first_use
    process = os.getpid()
    if _first_use is None:
        _first_use = process
    elif _first_use != process:
        raise RuntimeError(
            f"process {process} was forked from process {_first_use} after that had used jax_w4a8, and JAX's "
            "threads don't survive a fork: start processes by multiprocessing's 'spawn' or 'forkserver', or "
            "fork before the first use of JAX"
        )


def release_scratch() -> int:
    """Frees the working memory that calls keep for the next ones; returns its size in bytes.

    Kept are at most one block for each call that ran at the same time, and 1 GiB in all. One call's block
    holds, for each of at most 2048 tokens, about ``H + k * (4 * H + 5 * I)`` bytes.
    """
    return _native.release_scratch() if native_available() else 0


def peak_probe(iterations: int) -> int:
    """Multiplies INT8 codes in registers alone, for measuring the machine's peak; returns how many."""
    _require_native()
    return _native.peak_probe(iterations)


def read_probe(data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Reads contiguous bytes once, as a kernel reads weights, for measuring the machine's bandwidth."""
    _require_native()
    _native.read_probe(data)


def lowering(operation: str) -> Callable[..., Any]:
    """The MLIR lowering rule of an operation's custom call; attributes are given as keywords."""
    return jax.ffi.ffi_lowering(_TARGETS[operation])


def attribute(value: bool | int | float) -> Any:
    """An attribute in the type that handlers expect: the one place where it is chosen."""
    if isinstance(value, bool):
        return np.bool_(value)
    return np.int32(value) if isinstance(value, int) else np.float32(value)
