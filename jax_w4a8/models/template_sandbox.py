"""Where chat templates run: Jinja's sandbox, with an end to what they may do.

Jinja's sandbox keeps a program away from Python's insides, and lets it loop and grow for ever. Here it ends
after a time, and arithmetic makes no texts or numbers of absurd sizes. Memory that loops fill has no limit
of its own.
"""

from __future__ import annotations

import re
import time
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: A conversation takes milliseconds.
SECONDS = 10.0
#: Characters of a text, or items of a list, that an operator may make; bits of a number.
_LONGEST, _MOST_BITS = 10_000_000, 10_000
_WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{6}|\*)")


class LimitError(TemplateError):
    """A template wants too much."""


class _Generation(Extension):
    """``{% generation %}`` marks a model's own words for training; here its content counts alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Ticking(CodeGenerator):
    """Looks at the clock in every round of a loop and every call of a macro."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        node.body.insert(0, _tick(node.lineno))
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        node.body.insert(0, _tick(node.lineno))
        return super().macro_body(node, frame)


def _tick(line: int) -> nodes.Node:
    call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
    return nodes.ExprStmt(call).set_lineno(line, override=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates."""

    code_generator_class = _Ticking
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        del self.globals["lipsum"]
        self._deadline = 0.0

    def start(self) -> None:
        """Begins to count the time."""
        self._deadline = time.monotonic() + SECONDS

    def tick(self) -> None:
        """Raises LimitError when the time is over."""
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes more than {SECONDS:.0f} seconds")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes what has a sensible size.

        Raises:
          LimitError: it hasn't.
        """
        if _is_absurd(operator, left, right):
            raise LimitError(f"{operator!r} would make a value of absurd size")
        return super().call_binop(context, operator, left, right)


def _is_absurd(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and _WIDE.search(left) is not None
    if operator == "+":
        return _length(left) + _length(right) > _LONGEST
    if not isinstance(left, int) or not isinstance(right, int):
        count = left if isinstance(left, int) else right
        return isinstance(count, int) and max(_length(left), _length(right)) * count > _LONGEST
    bits = left.bit_length()
    return (bits * abs(right) if operator == "**" else bits + right.bit_length()) > _MOST_BITS


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0
