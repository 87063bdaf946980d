"""No object but its own holds an instruction set's instructions: none is met before the choice was made."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_w4a8 as w4a8

ROOT = Path(__file__).parent.parent
TOOLS = ("as", "c++", "nm", "objcopy", "objdump")

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="is about x86-64"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]


def disassembly(build):
    command = [sys.executable, ROOT / "tools" / "disassembly.py", build]
    return subprocess.run(command, capture_output=True, text=True)


def code_of(extension, directory):
    """The extension's machine code, which stripping leaves as it is."""
    code = directory / "code"
    subprocess.run(["objcopy", "-O", "binary", "--only-section=.text", extension, code], check=True)
    return code.read_bytes()


@pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here")
def test_objects_of_the_extension_in_use(tmp_path):
    from jax_w4a8 import _native

    code = code_of(_native.__file__, tmp_path)
    found = [path for path in ROOT.glob("build/*/_native*") if code_of(path, tmp_path) == code]
    if not found:
        pytest.skip("the extension in use was not built in build/ of this tree")
    done = disassembly(found[0].parent)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()[1:]}
    for name in w4a8.instruction_sets():
        assert int(rows[f"{name}.cc.o"][1]) > 5000  # a whole algorithm was looked at
    assert {"handlers.cc.o", "matmul.cc.o", "dispatch.cc.o", "module.cc.o"} <= rows.keys()


def table(function, kind="void"):
    """Source of an object as kernels are: a constant that holds the address of a hidden function."""
    return f"{function} extern {kind} (*const k)(); {kind} (*const k)() = f;"


def doing(instruction):
    return table(f'static void f() {{ asm("{instruction}"); }}')


#: The library, its source, and what is said about it.
FAULTS = {
    "AVX in the runtime": (
        "runtime",
        '#pragma GCC target("avx")\nvoid f(float* x) { for (int i = 0; i < 64; ++i) x[i] *= 2; }',
        "`vmovups' is not supported on `generic64'",
    ),
    "SSE4 in the portable kernels": (
        "kernels_portable",
        doing("roundss $0,%xmm0,%xmm1"),
        "`roundss' is not supported on `generic64'",
    ),
    "AVX-512 in AVX-VNNI": (
        "kernels_avx_vnni",
        doing("vpaddd %zmm0,%zmm1,%zmm2"),
        "vpaddd %zmm0,%zmm1,%zmm2: encoded for AVX-512",
    ),
    "AVX2's text in AVX-512's encoding": (
        "kernels_avx2",
        doing("{evex} vpaddd %ymm0,%ymm1,%ymm2"),
        "vpaddd %ymm0,%ymm1,%ymm2: encoded for AVX-512",
    ),
    "VNNI in AVX2": (
        "kernels_avx2",
        doing("{vex} vpdpbusd %ymm0,%ymm1,%ymm2"),
        "`vpdpbusd' is not supported on `generic64.avx2.fma.f16c'",
    ),
    "GFNI in AVX-512": (
        "kernels_avx512_vnni",
        doing("vgf2p8affineqb $0,%zmm0,%zmm1,%zmm2"),
        "`vgf2p8affineqb' is not supported on",
    ),
    "tiles in AVX-512": ("kernels_avx512_vnni", doing("tilerelease"), "`tilerelease' is not supported on"),
    "a function for all": ("kernels_avx2", "int f() { return 1; }", "symbol _Z1fv (T)"),
    "a shared inline function": (
        "kernels_avx2",
        table("inline int f() { return 1; }", "int"),
        "symbol _Z1fv (W)",
    ),
    "code before the choice": (
        "kernels_avx2",
        "static int f(volatile int* x) { return *x; } static int y; extern int k; int k = f(&y);",
        "section .init_array",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, tmp_path):
    library, source, said = FAULTS[fault]
    for name, text in {"kernels_portable": doing("nop"), library: source}.items():
        directory = tmp_path / "CMakeFiles" / f"{name}.dir"
        directory.mkdir(parents=True)
        command = ["c++", "-O2", "-x", "c++", "-c", "-o", directory / "one.cc.o", "-"]
        subprocess.run(command, input=text, text=True, check=True)
    done = disassembly(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout


def test_no_objects_is_an_error(tmp_path):
    done = disassembly(tmp_path)
    assert done.returncode != 0
    assert "holds no kernels" in done.stderr
