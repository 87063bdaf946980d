"""Checks what is inside built wheels: ``python tools/check_wheel.py dist/*.whl``; needs nothing installed.

A wheel has the extension, the type marker and the licence, no test and no build output, a tag that package
indexes accept, and less than 3 MB beside the demo model.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path, PurePosixPath

MAX_BYTES = 3_000_000  # beside DEMO
DEMO = "jax_w4a8/models/kjv_qwen3_moe/"
REQUIRED = ("jax_w4a8/py.typed", "jax_w4a8/_native.pyi", DEMO + "model.safetensors", DEMO + "MODEL_CARD.md")
#: Endings of the package's files; ``.json`` and ``.safetensors`` are the demo model's.
SUFFIXES = {".py", ".pyi", ".typed", ".json", ".safetensors", ".md"}
EXTENSION = {
    "cp311-cp311": r"jax_w4a8/_native\.(cpython-311-[\w-]+\.so|cp311-win_amd64\.pyd)",
    "cp312-abi3": r"jax_w4a8/_native\.(abi3\.so|pyd)",
}
PLATFORM = r"(manylinux_2_\d+_(x86_64|aarch64)|macosx_1\d_\d_arm64|win_amd64)"


def faults(wheel: Path) -> list[str]:
    """What is wrong with ``wheel``: names of files, tags and sizes."""
    name, version, python, abi, platform = wheel.stem.split("-")
    found = []
    tag = f"{python}-{abi}"
    if tag not in EXTENSION:
        return [f"tag {tag} is none of {list(EXTENSION)}"]
    if not all(re.fullmatch(PLATFORM, part) for part in platform.split(".")):
        found.append(f"platform {platform} is not one that jaxlib has wheels for, or was not repaired")
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.compress_size for info in archive.infolist() if not info.is_dir()}
    metadata = f"{name}-{version}.dist-info/"
    licence = metadata + "licenses/LICENSE"
    found += [f"{path} is missing" for path in (*REQUIRED, licence) if path not in sizes]
    package = [path for path in sizes if not path.startswith(metadata)]
    extensions = [path for path in package if re.fullmatch(EXTENSION[tag], path)]
    if len(extensions) != 1:
        found.append(f"expected one file {EXTENSION[tag]}, got {extensions}")
    for path in package:
        known = PurePosixPath(path).suffix in SUFFIXES and path.startswith("jax_w4a8/")
        if path not in extensions and (not known or "/test" in path):
            found.append(f"{path} does not belong into a wheel")
    beside_demo = sum(size for path, size in sizes.items() if not path.startswith(DEMO))
    if beside_demo >= MAX_BYTES:
        found.append(f"{beside_demo} bytes beside the demo model, more than {MAX_BYTES}")
    print(f"{wheel.name}: {wheel.stat().st_size} bytes, {beside_demo} beside the demo model")
    return found


def main() -> None:
    """Prints sizes and faults; exits with 1 if there is one, or no wheel."""
    wheels = [Path(argument) for argument in sys.argv[1:]]
    found = [f"{wheel.name}: {fault}" for wheel in wheels for fault in faults(wheel)]
    sys.exit("\n".join(found) or (None if wheels else "name the wheels to check"))


if __name__ == "__main__":
    main()
