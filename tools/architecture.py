"""Draws docs/architecture.svg: the layers of the package, file by file, and the way of the data through them.

The order comes from tests/test_layering.py, which checks that imports follow it; what a file does comes from
its own first line. So the picture is as true as they are, and the same test fails when it is out of date.

    python tools/architecture.py
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"

WIDTH, ROW = 1190, 18
LEFT, TOP, GAP = 40, 70, 7
CORE_WIDTH, FULL_WIDTH = 730, 1110
FLOW_X, FLOW_WIDTH = 810, 340
#: A column of files: the place of what a file does, and how many characters of it fit in a line.
CORE_COLUMN, FULL_COLUMN, HALF_COLUMN = (180, 84), (190, 140), (205, 54)
#: Boxes of more lines than this have two columns.
MANY_LINES = 10
FONT = "font-family='Helvetica, Arial, sans-serif'"
COLOURS = {"weights": "#dbe9f6", "calls": "#fde3c8", "models": "#dcf0dc", "native": "#e8e0f0"}

#: Layers of the Python package, as one colour each: the first module of a group, and the group's kind.
KINDS = {"quantization": "weights", "ffi": "calls", "blocks": "models"}

STEP = 62  # of the data flow, from box to box

#: From this layer on, boxes are as wide as the picture, with files in two columns: packages of many files.
FIRST_WIDE = "nnx"

#: The way of the data: a step, and the file that does it.
FLOW = (
    ("weights", "float weights, or a checkpoint's tensors", "quantization.py, checkpoint/"),
    ("weights", "codes and scales", "quantization.py"),
    ("weights", "packed weights, a pytree", "weights.py"),
    ("calls", "router logits to ids and weights", "routing.py"),
    ("calls", "which backend?", "oracle.py"),
    ("calls", "arguments checked", "moe.py, linear.py, ragged.py"),
    ("calls", "reverse mode, vmap", "experts/gradients.py"),
    ("calls", "a primitive, lowered to a custom call", "experts/cpu_int4.py"),
    ("native", "buffers decoded and checked", "xla_ffi/handlers.cc"),
    ("native", "tokens to INT8, sorted by expert", "xla_ffi/moe.cc"),
    ("native", "cut into work for all threads", "xla_ffi/matmul.cc, parallel.cc"),
    ("native", "INT8 dot products, scales, activation", "xla_ffi/kernels/"),
    ("native", "slots combined in order", "xla_ffi/kernels/"),
    ("models", "modules, decoders, text", "nnx/, linen.py, models/"),
)


def order() -> list[tuple[str, ...]]:
    """The layers, as tests/test_layering.py has them."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER":
            return list(ast.literal_eval(node.value))
    raise ValueError("tests/test_layering.py has no ORDER")


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    sentence = re.split(r"(?<=[.:])\s", text.split("\n\n")[0].replace("\n", " "))[0]
    return sentence.rstrip(".:").replace("``", "")


def files(name: str) -> list[tuple[str, str]]:
    """(path, what it does) of a module, or of all modules of a package."""
    base = ROOT / "jax_w4a8" / name.replace(".", "/")
    if base.is_dir():
        return [(f"{name}/", _first_line(base / "__init__.py")), *_inside(base, ("*.py",), _first_line, 1)]
    path = base.with_suffix(".py")
    if path.exists():
        return [(f"{name.replace('.', '/')}.py", _first_line(path))]
    return [(name, "the extension, from xla_ffi/: at the end of this picture")]


def native_files() -> list[tuple[str, str]]:
    """The same of xla_ffi/."""
    inside = _inside(ROOT / "xla_ffi", ("*.h", "*.cc"), _first_comment, 1)
    return [("xla_ffi/", "The native extension, in C++17"), *inside]


def _inside(
    folder: Path, patterns: tuple[str, ...], describe: Callable[[Path], str], depth: int
) -> list[tuple[str, str]]:
    """Files of a folder, then those of folders in it; a .cc goes with the header of its name."""
    paths = sorted(
        path for pattern in patterns for path in folder.glob(pattern) if path.name != "__init__.py"
    )
    found = []
    for path in paths:
        if path.suffix == ".cc" and path.with_suffix(".h") in paths:
            continue
        both = " .cc" if path.suffix == ".h" and path.with_suffix(".cc") in paths else ""
        found.append((f"{'  ' * depth}{path.name}{both}", describe(path)))
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"):
        about = _first_line(inner / "__init__.py") if (inner / "__init__.py").exists() else ""
        files_in_it = _inside(inner, patterns, describe, depth + 1)
        found += [(f"{'  ' * depth}{inner.name}/", about), *files_in_it] if files_in_it else []
    return found


def _first_comment(path: Path) -> str:
    lines = re.match(r"(?://.*\n)*", path.read_text())
    text = " ".join(line.removeprefix("//").strip() for line in lines[0].splitlines()) if lines else ""
    return re.split(r"(?<=[.:;])\s", text)[0].rstrip(".:;").replace("`", "")


def _text(x: float, y: float, text: str, size: int = 12, **style: str) -> str:
    attributes = "".join(f" {key.replace('_', '-')}='{value}'" for key, value in style.items())
    return f"<text x='{x}' y='{y}' {FONT} font-size='{size}'{attributes}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{colour}' stroke='#667'"
        " stroke-width='0.8'/>"
    )


def _rows(
    rows: list[tuple[str, str]], x: float, y: float, column: tuple[int, int]
) -> tuple[list[str], float]:
    """Files under one another, long lines folded; and where they end."""
    parts = []
    for path, does in rows:
        indent = 10 + 6 * (len(path) - len(path.lstrip()))
        parts.append(_text(x + indent, y + 17, path.strip(), font_weight="bold"))
        for line in textwrap.wrap(does, column[1]) or [""]:
            parts.append(_text(x + column[0], y + 17, line))
            y += ROW
    return parts, y


def _box_of(rows: list[tuple[str, str]], y: float, kind: str, wide: bool) -> tuple[list[str], float]:
    """Files in a box, and where the next box begins."""
    lines = [max(1, len(textwrap.wrap(does, HALF_COLUMN[1]))) for _, does in rows]
    if wide and sum(lines) > MANY_LINES:
        cut = next(i for i in range(len(rows)) if 2 * sum(lines[:i]) >= sum(lines))
        parts, end = _rows(rows[:cut], LEFT, y, HALF_COLUMN)
        others, other_end = _rows(rows[cut:], LEFT + FULL_WIDTH / 2, y, HALF_COLUMN)
        parts, end = parts + others, max(end, other_end)
    else:
        parts, end = _rows(rows, LEFT, y, FULL_COLUMN if wide else CORE_COLUMN)
    width = FULL_WIDTH if wide else CORE_WIDTH
    return [_box(LEFT, y, width, end + 9 - y, COLOURS[kind]), *parts], end + 9 + GAP


def _layers() -> tuple[list[str], float]:
    parts, y, kind, wide = [], float(TOP), "native", False
    for names in order():
        kind = KINDS.get(names[0], kind)
        if names[0] == FIRST_WIDE:
            y, wide = max(y, TOP + STEP * len(FLOW)), True
        box, y = _box_of([row for name in names for row in files(name)], y, kind, wide)
        parts += box
    box, y = _box_of(native_files(), y + 20, "native", True)
    return parts + box, y


def _flow() -> list[str]:
    parts, y, height = [], TOP, 44
    for number, (kind, step, where) in enumerate(FLOW):
        parts.append(_box(FLOW_X, y, FLOW_WIDTH, height, COLOURS[kind]))
        middle = FLOW_X + FLOW_WIDTH / 2
        parts.append(_text(middle, y + 19, step, 13, text_anchor="middle", font_weight="bold"))
        parts.append(_text(middle, y + 35, where, 11, text_anchor="middle", fill="#444"))
        if number + 1 < len(FLOW):
            parts.append(
                f"<path d='M{middle} {y + height} v{STEP - height - 6}' stroke='#333' stroke-width='1.5'"
                " marker-end='url(#tip)'/>"
            )
        y += STEP
    return parts


def draw() -> str:
    """The picture as text."""
    layers, height = _layers()
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'>",
        "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='5' refY='3' orient='auto'>"
        "<path d='M0 0 L6 3 L0 6 z' fill='#333'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        _text(LEFT, 32, "Layers", 18, font_weight="bold"),
        _text(
            LEFT,
            54,
            "A file of the package imports only from files in boxes above its own, or from its own folder.",
        ),
        _text(FLOW_X, 32, "Data flow", 18, font_weight="bold"),
        _text(FLOW_X, 54, "From weights to a layer's output; colours as on the left."),
        *layers,
        *_flow(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
