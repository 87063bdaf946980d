"""Instructions per multiply-accumulate (MAC) of the Arm kernels' innermost loops, from their assembly.

Needs CMake and the cross compiler of cmake/aarch64-linux-gnu.cmake, and no Arm processor. With llvm-mca, the
cycles that its models of processors predict come beside them: predictions of a model, not measurements.

    python benchmarks/instructions.py [--mca llvm-mca-19] [--write]    # into docs/arm.md
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "arm.md"
BEGIN, END = "<!-- instructions.py -->\n", "<!-- end -->\n"
#: MACs of an instruction on 128-bit registers.
PRODUCTS = {
    "neon": {"smlal": 8, "smlal2": 8, "smull": 8, "smull2": 8},
    "neon_dotprod": {"sdot": 16},
    "neon_i8mm": {"smmla": 32},
}
MODELS = ("neoverse-n1", "neoverse-n2", "neoverse-v1", "neoverse-v2", "apple-m1")


class Loop(NamedTuple):
    """An innermost loop: the function that holds it, and its instructions."""

    name: str
    function: str
    body: list[str]

    @property
    def products(self) -> int:
        """How many instructions multiply."""
        return sum(opcode(line) in PRODUCTS[self.name] for line in self.body)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one turn."""
        return sum(PRODUCTS[self.name].get(opcode(line), 0) for line in self.body)

    @property
    def decodes(self) -> bool:
        """Whether it takes packed codes apart, which it does by shifts."""
        return any(opcode(line) == "ushr" for line in self.body)


def opcode(line: str) -> str:
    """The instruction's name, or an empty string for a label or a directive."""
    found = re.match(r"\t([a-z]\w*)", line)
    return found[1] if found else ""


def assembly(directory: Path) -> dict[str, str]:
    """Every kernel file compiled as the build compiles it, as text."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    options.append(f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}")
    configure = ["cmake", "-S", ROOT / "tests" / "native", "-B", directory, *options]
    subprocess.run(configure, check=True, capture_output=True)
    texts = {}
    for entry in json.loads((directory / "compile_commands.json").read_text()):
        name = Path(entry["file"]).stem
        if name not in PRODUCTS:
            continue
        command = shlex.split(entry["command"])
        command[command.index("-o") + 1] = "-"
        command[command.index("-c")] = "-S"
        done = subprocess.run(command, cwd=directory, check=True, stdout=subprocess.PIPE, text=True)
        texts[name] = done.stdout
    return texts


def innermost_loops(name: str, text: str) -> list[Loop]:
    """Bodies between a label and a branch back to it, with no other such branch in between."""
    lines = text.splitlines()
    labels: dict[str, int] = {}
    loops: list[Loop] = []
    function, last = "", -1
    for number, line in enumerate(lines):
        if label := re.match(r"(\w\S*|\.L\w+):", line):
            labels[label[1]] = number
            function = function if label[1].startswith(".L") else label[1]
        branch = re.match(r"\t(?:b\.?\w*|cbn?z|tbn?z)\t(?:.*, )?(\.L\w+)$", line)
        if branch and branch[1] in labels:
            start = labels[branch[1]]
            if start > last:
                body = [inside for inside in lines[start : number + 1] if opcode(inside)]
                loops.append(Loop(name, function, body))
            last = number
    return loops


def tile_loop(name: str, text: str, decodes: bool) -> Loop:
    """That of the tallest tile."""
    loops = [loop for loop in innermost_loops(name, text) if loop.products and loop.decodes == decodes]
    loops = [loop for loop in loops if "PeakProbe" not in loop.function]
    return max(loops, key=lambda loop: (loop.products, -len(loop.body)))


def cycles(loop: Loop, mca: str, model: str) -> str:
    """Cycles of one turn by llvm-mca, or a dash where it has no model of that name."""
    source = "\n".join([".arch armv8.2-a+dotprod+i8mm", *loop.body[:-1], ""])
    command = [mca, "-mtriple=aarch64-linux-gnu", f"-mcpu={model}", "-iterations=100"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if "not a recognized processor" in done.stderr or done.returncode:
        return "-"
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total is not None, done.stdout
    return f"{int(total[1]) / 100:.1f}"


def counts_table(loops: list[Loop]) -> str:
    rows = [
        "| instruction set | weights from | products | instructions | MACs | a MAC | least | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for loop in loops:
        each, least = len(loop.body) / loop.macs, loop.products / loop.macs
        where = "packed codes" if loop.decodes else "a panel"
        rows.append(
            f"| `{loop.name}` | {where} | {loop.products} | {len(loop.body)} | {loop.macs}"
            f" | {each:.4f} | {least:.4f} | {each / least:.2f} |"
        )
    return "\n".join(rows)


def cycles_table(loops: list[Loop], mca: str) -> str:
    rows = [
        f"| instruction set | products | {' | '.join(MODELS)} |",
        "| --- | --- |" + " --- |" * len(MODELS),
    ]
    for loop in loops:
        predicted = " | ".join(cycles(loop, mca, model) for model in MODELS)
        rows.append(f"| `{loop.name}` | {loop.products} | {predicted} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mca", default=shutil.which("llvm-mca"), help="llvm-mca to ask for cycles")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/arm.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        texts = assembly(Path(directory))
    kinds = [(name, decodes) for name in PRODUCTS for decodes in (False, True)]
    loops = [tile_loop(name, texts[name], decodes) for name, decodes in kinds]
    compiler = re.search(r'\.ident\t"(.*)"', texts["neon"])
    text = f"Compiler: {compiler[1] if compiler else 'unknown'}.\n\n{counts_table(loops)}\n"
    if arguments.mca:
        version = subprocess.run([arguments.mca, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"LLVM version (\S+)", version)
        text += (
            f"\nCycles of one turn as llvm-mca {found[1] if found else ''} predicts them, panels only:\n\n"
        )
        text += cycles_table([loop for loop in loops if not loop.decodes], arguments.mca) + "\n"
    print(text, end="")
    if arguments.write:
        page = PAGE.read_text()
        before, after = page.index(BEGIN) + len(BEGIN), page.index(END)
        PAGE.write_text(f"{page[:before]}\n{text}\n{page[after:]}")


if __name__ == "__main__":
    main()
