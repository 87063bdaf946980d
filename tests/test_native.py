"""The native test program: every instruction set has the recorded bits, here and on emulated processors."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "tests" / "native"
CHECKSUMS = SOURCES / "checksums.txt"


#: What qemu's models of processors have.
EMULATED = {
    "max": ["neon_i8mm", "neon_dotprod", "neon", "portable"],
    "neoverse-n1": ["neon_dotprod", "neon", "portable"],
    "cortex-a72": ["neon", "portable"],
}


def need(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")


def build(directory: Path, *options: str) -> Path:
    """Builds the program below ``build/``, where the next run finds what hasn't changed."""
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
    need("cmake", "c++")
    return build(ROOT / "build" / "native")


@pytest.fixture(scope="module")
def arm_program() -> Path:
    need("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    toolchain = ROOT / "cmake" / "aarch64-linux-gnu.cmake"
    return build(ROOT / "build" / "native-aarch64", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}")


def assert_recorded_bits(names: list[str], *command: object) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    cases = len(CHECKSUMS.read_text().splitlines())
    assert done.stderr.splitlines() == [f"{name}: {cases} cases, 0 differences" for name in names]


def test_every_instruction_set_has_the_recorded_bits(program):
    names = run(program, "--instruction-sets").stdout.split()
    assert names[-1] == "portable"
    assert_recorded_bits(names, program)


def test_every_arm_instruction_set_has_the_recorded_bits(arm_program):
    assert_recorded_bits(EMULATED["max"], "qemu-aarch64", "-cpu", "max", arm_program)


@pytest.mark.parametrize("model", EMULATED)
def test_an_arm_processor_gets_what_it_has(arm_program, model):
    """An instruction that the model lacks would end the program: the best set runs on it."""
    emulated = ["qemu-aarch64", "-cpu", model, arm_program]
    assert run(*emulated, "--instruction-sets").stdout.split() == EMULATED[model]
    best = EMULATED[model][0]
    assert_recorded_bits([best], *emulated, "--instruction-set", best)


def test_the_model_of_tile_instructions_has_the_recorded_bits(program):
    """The kernels for AMX, on every machine."""
    done = run(program, "--instruction-set", "amx_model")
    assert done.returncode == 0, done.stderr
    cases = len(CHECKSUMS.read_text().splitlines())
    assert done.stderr == f"amx_model: {cases} cases, 0 differences\n"


def test_units(program):
    done = run(program.with_name("native_units"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" checks, 0 failures\n")


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
