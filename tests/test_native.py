"""The native test program: every instruction set, on every machine, has the recorded bits."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests" / "native"
CHECKSUMS = SOURCES / "checksums.txt"


def build(directory: Path, *options: str) -> Path:
    """Builds the program below ``build/``, where the next run finds what hasn't changed."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    subprocess.run(
        ["cmake", "-S", SOURCES, "-B", directory, "-DCMAKE_BUILD_TYPE=Release", *options],
        check=True,
        capture_output=True,
    )
    done = subprocess.run(["cmake", "--build", directory, "-j", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "native_tests"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def program() -> Path:
    return build(ROOT / "build" / "native")


def test_every_instruction_set_has_the_recorded_bits(program):
    names = run(program, "--instruction-sets").stdout.split()
    assert names[-1] == "portable"
    done = run(program)
    assert done.returncode == 0, done.stderr
    cases = len(CHECKSUMS.read_text().splitlines())
    assert done.stderr.splitlines() == [f"{name}: {cases} cases, 0 differences" for name in names]


def test_a_difference_is_named(program, tmp_path):
    lines = CHECKSUMS.read_text().splitlines()
    name, checksum = lines[100].split()
    changed = tmp_path / "checksums.txt"
    changed.write_text("\n".join([*lines[:100], f"{name} {'0' * 16}", *lines[102:], "gone 0123456789abcdef"]))
    done = run(program, "--instruction-set", "portable", "--checksums", changed)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"portable: {name} is {checksum}, recorded as {'0' * 16}",
        f"portable: {lines[101].split()[0]} is {lines[101].split()[1]}, recorded as nothing",
        f"portable: there is no case gone, which {changed} has",
        f"portable: {len(lines)} cases, 3 differences",
    ]
    assert len(done.stdout.splitlines()) == len(lines)


def test_an_unknown_instruction_set_is_refused(program):
    done = run(program, "--instruction-set", "sse9")
    assert done.returncode == 1
    assert done.stderr == "native_tests: instruction set sse9 isn't usable here\n"
