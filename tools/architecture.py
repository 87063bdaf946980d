"""Draws docs/architecture.svg: the layers of the package, file by file, and the way of the data through them.

The order comes from tests/test_layering.py, which checks that imports follow it; what a file does comes from
its own first line. So the picture is as true as they are, and the same test fails when it is out of date.

    python tools/architecture.py
"""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"

WIDTH, ROW = 1190, 19
LIST_X, LIST_WIDTH = 40, 730
FLOW_X, FLOW_WIDTH = 810, 340
FONT = "font-family='Helvetica, Arial, sans-serif'"
COLOURS = {"weights": "#dbe9f6", "calls": "#fde3c8", "models": "#dcf0dc", "native": "#e8e0f0"}

#: Layers of the Python package, as one colour each: the first module of a group, and the group's kind.
KINDS = {"quantization": "weights", "ffi": "calls", "blocks": "models"}

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
        inside = sorted(path for path in base.rglob("*.py") if path.name != "__init__.py")
        found = [(f"{name}/", _first_line(base / "__init__.py"))]
        return found + [(f"  {path.relative_to(base)}", _first_line(path)) for path in inside]
    path = base.with_suffix(".py")
    if path.exists():
        return [(f"{name.replace('.', '/')}.py", _first_line(path))]
    return [(name, "the extension: xla_ffi/")]


def _text(x: float, y: float, text: str, size: int = 12, **style: str) -> str:
    attributes = "".join(f" {key.replace('_', '-')}='{value}'" for key, value in style.items())
    return f"<text x='{x}' y='{y}' {FONT} font-size='{size}'{attributes}>{escape(text)}</text>"


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{colour}' stroke='#667'"
        " stroke-width='0.8'/>"
    )


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + " …"


def _layers(top: int) -> tuple[list[str], int]:
    parts, y, kind = [], top, "native"
    for names in order():
        kind = KINDS.get(names[0], kind)
        rows = [row for name in names for row in files(name)]
        height = ROW * len(rows) + 9
        parts.append(_box(LIST_X, y, LIST_WIDTH, height, COLOURS[kind]))
        for number, (path, does) in enumerate(rows):
            baseline = y + 17 + ROW * number
            indent = 22 if path.startswith("  ") else 10
            parts.append(_text(LIST_X + indent, baseline, path.strip(), font_weight="bold"))
            parts.append(_text(LIST_X + 190, baseline, _shorten(does, 78)))
        y += height + 7
    return parts, y


def _flow(top: int) -> list[str]:
    parts, y, height = [], top, 44
    for number, (kind, step, where) in enumerate(FLOW):
        parts.append(_box(FLOW_X, y, FLOW_WIDTH, height, COLOURS[kind]))
        middle = FLOW_X + FLOW_WIDTH / 2
        parts.append(_text(middle, y + 19, step, 13, text_anchor="middle", font_weight="bold"))
        parts.append(_text(middle, y + 35, where, 11, text_anchor="middle", fill="#444"))
        if number + 1 < len(FLOW):
            parts.append(
                f"<path d='M{middle} {y + height} v14' stroke='#333' stroke-width='1.5'"
                " marker-end='url(#tip)'/>"
            )
        y += height + 20
    return parts


def draw() -> str:
    """The picture as text."""
    layers, bottom = _layers(70)
    height = max(bottom, 70 + 64 * len(FLOW)) + 10
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'>",
        "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='5' refY='3' orient='auto'>"
        "<path d='M0 0 L6 3 L0 6 z' fill='#333'/></marker></defs>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        _text(LIST_X, 32, "Layers", 18, font_weight="bold"),
        _text(LIST_X, 54, "A file imports only from files in boxes above its own, or from its own folder."),
        _text(FLOW_X, 32, "Data flow", 18, font_weight="bold"),
        _text(FLOW_X, 54, "From weights to a layer's output."),
        *layers,
        *_flow(70),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
