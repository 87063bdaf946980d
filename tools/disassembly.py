"""Shows that only an instruction set's own objects hold its instructions, so that none can be illegal.

For every object of a build directory: each instruction must be one that the assembler takes for the baseline
x86-64 plus what the object's file was compiled for, and be encoded as such (an EVEX encoding is AVX-512,
whatever the text says). A kernel's object must define nothing but its table of functions: neither functions
that the linker could take for another file's copy, nor code that runs before the choice among the tables.

    python tools/disassembly.py build/cp311-cp311-linux_x86_64

Needs objdump, nm and as of binutils, on x86-64.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

AVX2 = "avx2 fma f16c"
AVX512_VNNI = f"{AVX2} avx512f avx512bw avx512vl avx512dq avx512_vnni"

#: What an object library of CMakeLists.txt may use beyond the baseline, in the assembler's names.
KERNELS = {
    "kernels_portable": "",
    "kernels_weights_portable": "",
    "kernels_avx2": AVX2,
    "kernels_weights_avx2": AVX2,
    "kernels_avx_vnni": f"{AVX2} avx_vnni",
    "kernels_avx512_vnni": AVX512_VNNI,
    "kernels_weights_avx512_vnni": AVX512_VNNI,
    "kernels_amx_int8": f"{AVX512_VNNI} gfni amx_tile amx_int8",
}

#: Reads the state that the system saves; it asks CPUID first whether it may.
OTHERS = {"cpu_x86.cc.o": "xsave"}

# Prefixes that may stand before a VEX or EVEX encoding: segments and address size.
_PREFIXES = {0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x67}
_EVEX = 0x62
# What processors without them run as something else that does the same: hints, and a TZCNT of a number that
# isn't 0, which is what compilers use as BSF.
_HARMLESS = re.compile(
    r"(data16 |cs |rep |repz |notrack |bnd )*(nop[wl]?|endbr64|xchg +%ax,%ax|pause|tzcnt)\b"
)
_LINE = re.compile(r"^\s*(?P<bytes>(?:[0-9a-f]{2} )+)\s*(?P<text>\S.*?)\s*$")


@dataclass(frozen=True)
class Report:
    """What was found in one object: its file, what it may use, its instructions' number, its faults."""

    path: Path
    allowed: str
    instructions: int
    evex: int
    faults: tuple[str, ...]


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(path: Path) -> list[tuple[bytes, str]]:
    """(bytes, text) of every instruction of an object."""
    listing = _run("objdump", "--disassemble", "--no-addresses", "--insn-width=16", path)
    found = (_LINE.match(line) for line in listing.splitlines())
    return [(bytes.fromhex(match["bytes"]), match["text"]) for match in found if match]


def _is_evex(code: bytes) -> bool:
    return next((byte for byte in code if byte not in _PREFIXES), 0) == _EVEX


def _source(text: str) -> str:
    """An instruction as the assembler takes it: without comments, and with itself as a jump's target."""
    return re.sub(r"<[^>]*>", ".", re.sub(r"\s+#.*", "", text))


def refused(texts: Iterable[str], allowed: str) -> list[str]:
    """Instructions that the assembler refuses for the baseline with ``allowed``, and why."""
    sources = sorted({_source(text) for text in texts if not _HARMLESS.match(text)})
    architecture = "+".join(["generic64", *allowed.split()])
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "all.s"
        file.write_text("".join(f"{source}\n" for source in sources))
        command = ["as", "--64", f"-march={architecture}", "-o", str(file.with_suffix(".o")), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    errors = re.findall(r"^.*?:(\d+): Error: (.*)$", done.stderr, re.MULTILINE)
    if done.returncode and not errors:
        raise RuntimeError(f"as failed: {done.stderr}")
    return [f"{sources[int(line) - 1]}: {message}" for line, message in errors]


def shared_symbols(path: Path) -> list[str]:
    """Functions that the linker sees, weak data, and code that runs when the extension is loaded."""
    symbols = [line.split()[-2:] for line in _run("nm", "--defined-only", path).splitlines()]
    faults = [f"symbol {name} ({kind})" for kind, name in symbols if kind in "TWwVviu"]
    sections = _run("objdump", "--section-headers", path)
    return faults + [f"section {name}" for name in re.findall(r"\.(?:init_array|ctors)\S*", sections)]


def check(path: Path) -> Report:
    """Of one object, by the name of its library."""
    library = next((part for part in path.parts if part.startswith("kernels_")), "").removesuffix(".dir")
    if library and library not in KERNELS:
        raise KeyError(f"{path}: tools/disassembly.py doesn't know what {library} may use")
    allowed = KERNELS[library] if library else OTHERS.get(path.name, "")
    found = instructions(path)
    evex = [text for code, text in found if _is_evex(code)]
    faults = refused((text for _, text in found), allowed)
    if "avx512f" not in allowed:
        faults += [f"{text}: encoded for AVX-512" for text in sorted(set(evex))]
    if library:
        faults += shared_symbols(path)
    return Report(path, allowed, len(found), len(evex), tuple(faults))


def check_build(build: Path) -> list[Report]:
    """Of every object that a build directory of this project holds.

    Raises:
      FileNotFoundError: there is none of an instruction set's.
    """
    objects = sorted((build / "CMakeFiles").rglob("*.o"))
    if not any("kernels_" in str(path) for path in objects):
        raise FileNotFoundError(f"{build} holds no kernels: build there first")
    return [check(path) for path in objects]


def main() -> int:
    """Prints a line for each object and its faults; returns 1 if there is any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("build", type=Path, help="a build directory of CMake")
    reports = check_build(parser.parse_args().build)
    print(f"{'object':30} {'instructions':>12} {'EVEX':>6} {'faults':>6}  may use beyond the baseline")
    for report in reports:
        faults = len(report.faults)
        print(f"{report.path.name:30} {report.instructions:12} {report.evex:6} {faults:6}  {report.allowed}")
        for fault in report.faults[:10]:
            print(f"    {fault}")
    return any(report.faults for report in reports)


if __name__ == "__main__":
    sys.exit(main())
