"""The check of built wheels accepts a good one and names what is wrong with others; nox builds real ones."""

import os
import runpy
import zipfile
from pathlib import Path

import pytest

TOOL = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "check_wheel.py"))
TAG = "cp312-abi3-manylinux_2_28_x86_64"
LICENCE = "jax_w4a8-0.1.0.dist-info/licenses/LICENSE"
GOOD = {
    **dict.fromkeys((*TOOL["REQUIRED"], LICENCE, "jax_w4a8/__init__.py"), 1),
    "jax_w4a8/_native.abi3.so": 1,
}


def faults(directory, sizes, tag=TAG):
    wheel = directory / f"jax_w4a8-0.1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.mkdir("jax_w4a8")  # as auditwheel does
        for path, size in sizes.items():
            archive.writestr(path, os.urandom(size))
    return TOOL["faults"](wheel)


def test_a_good_wheel_has_no_fault(tmp_path):
    assert faults(tmp_path, GOOD) == []
    assert faults(tmp_path, GOOD | {TOOL["DEMO"] + "model.safetensors": TOOL["MAX_BYTES"]}) == []
    extensions = {"jax_w4a8/_native.pyd": 1, "jax_w4a8/_native.abi3.so": 1}
    assert len(faults(tmp_path, GOOD | extensions)) == 1


@pytest.mark.parametrize(
    ("files", "tag", "named"),
    [
        ({"jax_w4a8/_native.abi3.so": 3_000_000}, TAG, "bytes beside the demo model"),
        ({"jax_w4a8/tests/test_moe.py": 1}, TAG, "jax_w4a8/tests/test_moe.py does not belong"),
        ({"jax_w4a8/build.ninja": 1}, TAG, "jax_w4a8/build.ninja does not belong"),
        ({"tests/reference.py": 1}, TAG, "tests/reference.py does not belong"),
        ({}, "cp312-abi3-linux_x86_64", "linux_x86_64 is not one"),
        ({}, "cp312-cp312-manylinux_2_28_x86_64", "cp312-cp312 is none"),
        ({}, "cp311-cp311-manylinux_2_28_x86_64", "expected one file"),
    ],
)
def test_a_fault_is_named(tmp_path, files, tag, named):
    (fault,) = [fault for fault in faults(tmp_path, GOOD | files, tag) if named in fault]
    assert fault


@pytest.mark.parametrize("path", [*TOOL["REQUIRED"], LICENCE])
def test_a_missing_file_is_named(tmp_path, path):
    without = {name: size for name, size in GOOD.items() if name != path}
    assert faults(tmp_path, without) == [f"{path} is missing"]
