"""What quantising cost: the relative error of every module and layer."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

_LAYER = re.compile(r"((?:.*\.)?layers\.\d+)\.(.*)")


@dataclasses.dataclass(frozen=True)
class ModuleError:
    """The error of one module's weights.

    Attributes:
      name: the module.
      shape: ``(N, K)``.
      squared_error, squared_norm: sums of ``(weight - code * scale)**2`` and ``weight**2``.
    """

    name: str
    shape: tuple[int, ...]
    squared_error: float
    squared_norm: float

    @property
    def relative_error(self) -> float:
        """Relative L2: root of the one sum by the other; 0 for weights of zeros."""
        return _relative([self])


def _relative(modules: Iterable[ModuleError]) -> float:
    modules = tuple(modules)
    norm = sum(module.squared_norm for module in modules)
    return math.sqrt(sum(module.squared_error for module in modules) / norm) if norm else 0.0


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The error of one decoder layer.

    Attributes:
      name: the layer.
      attention, mlp: relative L2 over the modules of its two halves; None where none is quantised.
      worst: the module with the largest error.
    """

    name: str
    attention: float | None
    mlp: float | None
    worst: ModuleError


@dataclasses.dataclass(frozen=True)
class QuantizationReport:
    """Errors of all quantised modules, in the order of the files.

    Attributes:
      options: how they were quantised.
      modules: one by one.
    """

    options: Mapping[str, Any]
    modules: tuple[ModuleError, ...]

    @property
    def relative_error(self) -> float:
        """Relative L2 over all modules."""
        return _relative(self.modules)

    @property
    def squared_error(self) -> float:
        """Sum over all weights."""
        return sum(module.squared_error for module in self.modules)

    def layers(self) -> tuple[LayerError, ...]:
        """The same by decoder layer, in ascending order."""
        layers: dict[str, list[ModuleError]] = {}
        for module in self.modules:
            match = _LAYER.fullmatch(module.name)
            layers.setdefault(match[1] if match else module.name, []).append(module)
        return tuple(_layer(name, layers[name]) for name in sorted(layers, key=_natural))

    def table(self) -> str:
        """One line per layer, for people."""
        rows = [("layer", "attention", "MLP", "worst module", "")]
        for layer in self.layers():
            worst = layer.worst
            rows.append(
                (
                    layer.name,
                    _percent(layer.attention),
                    _percent(layer.mlp),
                    worst.name.removeprefix(f"{layer.name}."),
                    _percent(worst.relative_error),
                )
            )
        rows.append(("all", "", _percent(self.relative_error), "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "options": dict(self.options),
            "relative_error": self.relative_error,
            "layers": [
                {
                    "name": layer.name,
                    "attention": layer.attention,
                    "mlp": layer.mlp,
                    "worst": layer.worst.name,
                    "worst_relative_error": layer.worst.relative_error,
                }
                for layer in self.layers()
            ],
            "modules": [
                {"name": m.name, "shape": list(m.shape), "relative_error": m.relative_error}
                for m in self.modules
            ],
        }


def _layer(name: str, modules: list[ModuleError]) -> LayerError:
    attention = [module for module in modules if "attn" in module.name or "attention" in module.name]
    rest = [module for module in modules if module not in attention]
    return LayerError(
        name,
        _relative(attention) if attention else None,
        _relative(rest) if rest else None,
        max(modules, key=lambda module: module.relative_error),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3f} %"
