"""The choice among instruction sets where the system withholds registers, and on older processors."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8

from .reference import compiled, in_process, random_batch, random_layer
from .test_native import CHECKSUMS, build

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tiles() -> None:
    """Not a mark, which would ask for them whenever this file is imported."""
    if "amx_int8" not in w4a8.instruction_sets():
        pytest.skip("this machine has no AMX")


# ---------------------------------------------------------------------------------------------------------
# Tile registers that Linux doesn't give, though the processor has them.

ARCH_PRCTL = 158
GET_PERMISSION, REQUEST_PERMISSION = 0x1022, 0x1023


class Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_void_p))


def answer(requests: tuple[int, ...], errno: int) -> None:
    """From now on, these requests of arch_prctl return -1 with ``errno``, or 0 for 0, and do nothing."""
    load, equal, give = 0x20, 0x15, 0x06  # of words, by Linux's filter.h and seccomp.h
    number, argument, allow = 0, 16, 0x7FFF0000
    steps = [(load, 0, 0, number), (equal, 0, len(requests) + 1, ARCH_PRCTL), (load, 0, 0, argument)]
    steps += [(equal, len(requests) - i, 0, request) for i, request in enumerate(requests)]
    steps += [(give, 0, 0, allow), (give, 0, 0, 0x50000 | errno)]
    code = np.array(steps, dtype=[("code", "u2"), ("if", "u1"), ("else", "u1"), ("k", "u4")])
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    program = Filter(len(code), code.ctypes.data)
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(
        ctypes.get_errno()
    )  # PR_SET_SECCOMP


def checksum() -> str:
    layer = random_layer(0, 3, 150, 70, 32, jnp.bfloat16).packed()
    result = np.asarray(compiled.fused_experts(*random_batch(23, 150, 3), layer))
    return hashlib.sha256(result.tobytes()).hexdigest()


def report() -> None:
    """Prints the instruction sets of this process, the one in use, and a result."""
    print(",".join(w4a8.instruction_sets()), w4a8.instruction_set(), checksum())


def denied() -> None:
    answer((REQUEST_PERMISSION,), 1)
    report()


def granted_by_word_alone() -> None:
    answer((GET_PERMISSION, REQUEST_PERMISSION), 0)
    report()


def small_signal_stack() -> None:
    """Linux gives no thread more registers than its alternate signal stack has room for."""

    class Stack(ctypes.Structure):
        _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

    memory = ctypes.create_string_buffer(4096)
    stack = Stack(ctypes.addressof(memory), 0, len(memory))
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
    report()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    "run", [denied, granted_by_word_alone, small_signal_stack], ids=lambda run: run.__name__
)
def test_without_tile_registers_the_next_set_is_chosen(run):  # [E6]
    names, chosen, result = in_process(run).split()
    assert names.split(",") == [name for name in w4a8.instruction_sets() if name != "amx_int8"]
    assert chosen == names.split(",")[0]
    assert result == checksum()


def permission_before_and_after() -> None:
    permitted = ctypes.c_uint64()
    libc = ctypes.CDLL(None)
    for ask in (lambda: None, w4a8.instruction_sets):
        ask()
        assert libc.syscall(ARCH_PRCTL, GET_PERMISSION, ctypes.byref(permitted)) == 0
        print(permitted.value >> 18 & 1)


@pytest.mark.usefixtures("tiles")
def test_tile_registers_are_asked_for_at_first_use():
    """Not by the import: a process that has them can't have small alternate signal stacks any more."""
    assert in_process(permission_before_and_after).split() == ["0", "1"]


# ---------------------------------------------------------------------------------------------------------
# Processors that an emulator has.

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
LINUX_X86 = platform.machine() == "x86_64" and sys.platform == "linux"


@pytest.fixture(scope="module")
def native() -> Path:
    if not all(map(shutil.which, ("cmake", "c++"))):
        pytest.skip("needs cmake and c++")
    return build(ROOT / "build" / "native").parent


def emulate(model: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Runs a command on a processor of the emulator's; stderr is without what that says itself."""
    arguments = [str(part) for part in (QEMU, "-cpu", model, *command)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=600)
    done.stderr = "".join(
        line for line in done.stderr.splitlines(keepends=True) if not line.startswith("qemu-")
    )
    return done


@pytest.mark.skipif(not LINUX_X86, reason="is about x86-64")
@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (Debian: qemu-user)")
class TestEmulated:
    @pytest.mark.parametrize(
        ("model", "sets"),
        [
            ("Nehalem", ["portable"]),  # no AVX
            ("SandyBridge", ["portable"]),  # AVX, but not AVX2
            ("Haswell", ["avx2", "portable"]),
            ("Haswell,-fma", ["portable"]),
            ("Haswell,-xsave", ["portable"]),
            ("max", ["avx2", "portable"]),  # all that the emulator can do
        ],
    )
    def test_the_choice(self, native, model, sets):
        done = emulate(model, native / "native_tests", "--instruction-sets")
        assert done.stdout.split() == sets, done.stderr

    @pytest.mark.parametrize(("model", "name"), [("Nehalem", "portable"), ("Haswell", "avx2")])
    def test_the_best_set_has_the_recorded_bits(self, native, model, name):
        done = emulate(model, native / "native_tests", "--instruction-set", name)
        assert done.returncode == 0, done.stderr
        cases = len(CHECKSUMS.read_text().splitlines())
        assert done.stderr == f"{name}: {cases} cases, 0 differences\n"

    def test_the_package_on_the_oldest_processor_that_jaxlib_runs_on(self):
        done = emulate("SandyBridge", sys.executable, "-c", f"from {__name__} import report; report()")
        if "jaxlib was built using AVX2" in done.stderr:
            pytest.skip("this jaxlib needs AVX2 itself")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["portable", "portable", checksum()]

    def test_on_older_ones_jaxlib_says_what_it_needs(self):  # [E7]
        done = emulate("Nehalem", sys.executable, "-c", "import jax_w4a8")
        assert done.returncode == 1
        assert "RuntimeError: This version of jaxlib was built using AVX instructions" in done.stderr
