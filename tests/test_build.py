"""Probes of public build and packaging faults (known faults, section E), as far as files show them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import jax_w4a8

from .reference import ROOT

native = pytest.importorskip("jax_w4a8._native")
BINARY = Path(native.__file__).read_bytes()
CMAKE_FILES = ("CMakeLists.txt", "cmake/native.cmake", "cmake/handlers.cmake")
CMAKE = "".join((ROOT / name).read_text() for name in CMAKE_FILES)
SOURCES = {
    path: path.read_text() for ending in ("cc", "h") for path in (ROOT / "xla_ffi").rglob(f"*.{ending}")
}
#: Object libraries that may have flags of an instruction set.
X86_KERNELS = {"avx2", "avx_vnni", "avx512_vnni", "amx_int8", "weights_avx2", "weights_avx512_vnni"}
ARM_KERNELS = {"neon", "neon_dotprod", "neon_i8mm"}


def test_only_the_typed_stable_ffi_is_used():  # [E2] [E3]
    included = {name for text in SOURCES.values() for name in re.findall(r'#include [<"](xla/[^>"]+)', text)}
    assert included <= {"xla/ffi/api/ffi.h", "xla/ffi/api/c_api.h"}
    package = Path(jax_w4a8.__file__).parent
    assert not any("xla_client.register_custom_call" in path.read_text() for path in package.rglob("*.py"))


def test_the_build_brings_the_headers_along():  # [E4]
    assert re.search(r'requires = \[.*"jaxlib==', (ROOT / "pyproject.toml").read_text())
    assert "FATAL_ERROR" in CMAKE


def test_no_wheel_is_built_where_there_is_no_jaxlib():  # [E10]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "*-musllinux_*" in settings["tool"]["cibuildwheel"]["skip"]
    assert "musl (Alpine)" in (ROOT / "docs/installing.md").read_text()


def test_flags_of_an_instruction_set_stay_with_its_file():  # [E5]
    assert not re.search(r"-march=(?!armv8)|-mtune", CMAKE)
    with_flags = re.findall(r"add_kernels\((\w+)[^)]*(?: -m|AVX512_VNNI})", CMAKE)
    assert set(with_flags) == X86_KERNELS | ARM_KERNELS
    rest = re.sub(
        r"add_kernels\([^)]*\)|set\(AVX512_VNNI [^)]*\)|check_cxx_compiler_flag\([^)]*\)", "", CMAKE
    )
    assert not re.search(r"\s-m(?:avx|amx|fma|f16c|sse|gfni|arch)", rest)


def test_no_second_openmp_and_no_newer_system():  # [E8] [E9]
    if not BINARY.startswith(b"\x7fELF"):
        pytest.skip("looks into ELF files")
    assert not re.search(rb"lib(?:gomp|omp|iomp5)\b", BINARY)
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_(\d+\.\d+)", BINARY)}
    assert versions
    assert max(versions) <= (2, 34), "jaxlib's own wheels ask for no more"
