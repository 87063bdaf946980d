"""Draws the studies of errors.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

#: What an error is of: the whole, the weights' part, the activations' part.
PARTS = ("total", "weights", "activations")
_COLORS = {"total": "#222222", "weights": "#0b6fb8", "activations": "#d1495b"}
_STYLES = {"asymmetric": ("o", "-"), "symmetric": ("s", "--")}


@dataclasses.dataclass(frozen=True)
class Study:
    """How one study is shown.

    Attributes:
      title: says what varies, and at what.
      axis: the setting on the horizontal axis.
      names: what settings are called in words.
      logarithmic: whether the settings are numbers on a logarithmic axis; otherwise they stand side by side.
      fixed: settings that the plot holds fixed (tables show all).
    """

    title: str
    axis: str
    names: dict[str, str]
    logarithmic: bool = False
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)


STUDIES = {
    "groups": Study("One expert, silu", "group_size", {"group_size": "group size"}),
    "activations": Study(
        "One expert, groups of 128, by activation between its projections",
        "activation",
        {"activation": "activation"},
    ),
    "outliers": Study(
        "A linear map, groups of 128: one channel of the tokens is larger",
        "outlier",
        {"outlier": "times as large"},
        logarithmic=True,
    ),
    "inputs": Study(
        "A linear map, groups of 128, by its number of inputs",
        "inputs",
        {"inputs": "inputs K", "group_size": "group size"},
        logarithmic=True,
        fixed={"group_size": 128},
    ),
}


def draw(record: dict[str, Any], directory: Path) -> None:
    """One PNG for each study: medians as marks, ranges as bars."""
    directory.mkdir(exist_ok=True)
    for name, study in STUDIES.items():
        rows = [
            row
            for row in record["results"]
            if row["study"] == name and all(row[key] == value for key, value in study.fixed.items())
        ]
        _draw_study(study, rows, record["seeds"], directory / f"{name}.png")


def _draw_study(study: Study, rows: list[dict[str, Any]], seeds: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    settings = list(dict.fromkeys(row[study.axis] for row in rows))
    places = settings if study.logarithmic else list(range(len(settings)))
    for shift, part in zip((-0.12, 0, 0.12), PARTS, strict=True):
        for scheme, (marker, line) in _STYLES.items():
            if part == "weights" and scheme == "symmetric":
                continue  # the same: activations are not quantised in it
            errors = [row[part] for row in rows if row["scheme"] == scheme]
            medians = [100 * error["median"] for error in errors]
            spread = [
                [100 * (error["median"] - error["low"]) for error in errors],
                [100 * (error["high"] - error["median"]) for error in errors],
            ]
            label = "weights" if part == "weights" else f"{part}, {scheme}"
            look = {"color": _COLORS[part], "marker": marker, "linestyle": line if study.logarithmic else ""}
            beside = shift + (0.06 if scheme == "symmetric" else 0)
            where = places if study.logarithmic else [place + beside for place in places]
            axes.errorbar(where, medians, spread, label=label, markersize=5, capsize=3, linewidth=1.3, **look)
    if study.logarithmic:
        axes.set_xscale("log", base=10 if study.axis == "outlier" else 2)
    axes.set_xticks(places, ["channel-wise" if value == -1 else f"{value}" for value in settings])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(study.names[study.axis])
    axes.set_ylabel("relative error, %")
    axes.set_title(f"{study.title} (medians and ranges of {seeds} seeds)", loc="left", fontsize=10)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)
