"""The native sources compile for macOS and Windows, as far as a Linux machine can tell: syntax and types.

Windows has real headers, mingw's. For macOS clang targets it and takes headers of Linux for those of the
C and C++ libraries; what the operating system itself declares is stubbed.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINDOWS = """
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
"""
MACOS = """
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR {architecture})
set(CMAKE_CXX_COMPILER clang++)
set(CMAKE_CXX_COMPILER_TARGET {architecture}-apple-macos11)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_INSTALL_NAME_TOOL true)
set(CMAKE_OSX_SYSROOT "")
"""
SYSCTL = '#include <stddef.h>\nextern "C" int sysctlbyname(const char*, void*, size_t*, void*, size_t);\n'


def need(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def commands(directory: Path, toolchain: str) -> list[list[str]]:
    """How the build would compile each file of the native test program, which links all but the bindings."""
    (directory / "toolchain.cmake").write_text(toolchain)
    configure = ["cmake", "-S", ROOT / "tests" / "native", "-B", directory, "-DCMAKE_BUILD_TYPE=Release"]
    configure += ["-DCMAKE_TOOLCHAIN_FILE=toolchain.cmake", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    done = subprocess.run(configure, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    entries = json.loads((directory / "compile_commands.json").read_text())
    return [shlex.split(entry["command"]) for entry in entries]


def check(directory: Path, toolchain: str, *options: str) -> set[str]:
    """Checks every file; returns their names."""
    found = commands(directory, toolchain)

    def one(command: list[str]) -> None:
        checked = [*command, "-fsyntax-only", *options]
        done = subprocess.run(checked, cwd=directory, capture_output=True, text=True)
        assert done.returncode == 0, f"{command[-1]}: {done.stderr}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, found))
    return {Path(command[-1]).name for command in found}


def library_headers(compiler: str) -> list[str]:
    """Directories of the C and C++ headers, but not of the compiler's own."""
    done = subprocess.run([compiler, "-E", "-v", "-x", "c++", os.devnull], capture_output=True, text=True)
    listed = re.search(r"<\.\.\.> search starts here:\n(.*?)End of search", done.stderr, re.DOTALL)
    assert listed is not None, done.stderr
    paths = [str(Path(path).resolve()) for path in listed[1].split()]
    return [path for path in paths if "/lib/gcc" not in path]


def test_windows(tmp_path):
    need("cmake", "x86_64-w64-mingw32-g++-posix")
    names = check(tmp_path, WINDOWS)
    assert {"scratch.cc", "dispatch.cc", "avx2.cc", "avx512_vnni.cc", "portable.cc", "main.cc"} <= names


@pytest.mark.parametrize(
    ("architecture", "compiler", "expected"),
    [("arm64", "aarch64-linux-gnu-g++", "neon_i8mm.cc"), ("x86_64", "x86_64-linux-gnu-g++", "avx2.cc")],
)
def test_macos(architecture, compiler, expected, tmp_path):
    need("cmake", "clang++", compiler)
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "sysctl.h").write_text(SYSCTL)
    # glibc's headers use a name that clang defines for macOS, and expect this definition from C++.
    options = ["-U__nonnull", "-D_GNU_SOURCE", "-nostdlibinc", "-isystem", str(tmp_path)]
    for path in library_headers(compiler):
        options += ["-isystem", path]
    names = check(tmp_path, MACOS.format(architecture=architecture), *options)
    assert {"scratch.cc", "dispatch.cc", "cpu_arm.cc", expected, "portable.cc", "main.cc"} <= names
