"""A roofline: what was reached, below the limits that the same run measured."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

_INK, _MUTED = "#222222", "#767676"
_COLORS = ("#0b6fb8", "#d1495b", "#3d8c40", "#b87a0b", "#7a4fb5", "#5b6770", "#c2518f")
_MARKERS = "os^Dvp"


def require_matplotlib() -> None:
    """Raises ImportError, with what to install, unless matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'jax_w4a8[bench]'")


def save_roofline(record: dict[str, Any], path: Path) -> None:
    """Draws the results of one run, as ``bench --json`` writes them.

    Each line follows one implementation through its numbers of tokens. The horizontal axis counts the
    multiply-accumulates that a byte of weights serves. Where the limits cross, work stops being bound by
    memory and starts being bound by arithmetic.

    Raises:
      ValueError: there are no results.
    """
    from matplotlib.figure import Figure

    results = record["results"]
    if not results:
        raise ValueError("there are no results to plot")
    threads = max(result["threads"] for result in results)
    figure = Figure(figsize=(9, 5.6), dpi=160, layout="constrained")
    axes = figure.subplots()
    series = _series(results, threads)
    _draw_limits(axes, record["limits"], threads, results)
    for index, (label, points) in enumerate(series.items()):
        _draw_series(axes, label, points, index)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("multiply-accumulates per byte that must be read or written")
    axes.set_ylabel("G MAC/s")
    works = sorted({(result["work"], result["group_size"]) for result in results})
    title = ", ".join(f"{name} g {group if group > 0 else 'channel'}" for name, group in works)
    axes.set_title(f"{title}: {threads} threads", loc="left", fontsize=11, color=_INK)
    axes.text(0, -0.14, record["machine"]["cpu"], transform=axes.transAxes, fontsize=7, color=_MUTED)
    axes.grid(which="major", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(path)


def _intensity(result: dict[str, Any]) -> float:
    return float(result["gmacs"] / result["gbytes"])


def _series(results: list[dict[str, Any]], threads: int) -> dict[str, list[dict[str, Any]]]:
    works = {(result["work"], result["group_size"]) for result in results}
    routings = {result["routing"] for result in results}
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["threads"] != threads:
            continue
        variant = "" if result["implementation"] == "scan" else result["variant"]
        label = f"{result['implementation']} {variant}".strip()
        if len(works) > 1:
            label += f", {result['work']} g {result['group_size']}"
        if len(routings) > 1:
            label += f", {result['routing']}"
        found.setdefault(label, []).append(result)
    return found


def _draw_limits(axes: Any, limits: dict[str, Any], threads: int, results: list[dict[str, Any]]) -> None:
    bandwidth = limits["bandwidth_gbytes"][str(threads)]
    peaks = {
        name: rates[str(threads)] for name, rates in limits["peak_gmacs"].items() if str(threads) in rates
    }
    used = {result["peak_set"] for result in results}
    peaks = {name: rate for name, rate in peaks.items() if name in used or rate >= max(peaks.values()) / 16}
    lowest = min(_intensity(result) for result in results) / 1.6
    highest = max(max(_intensity(result) for result in results), max(peaks.values()) / bandwidth) * 1.6
    for name, peak in sorted(peaks.items(), key=lambda item: item[1]):
        style = "-" if name in used else (0, (4, 3))
        axes.plot([peak / bandwidth, highest], [peak, peak], color=_MUTED, linewidth=1.1, linestyle=style)
        axes.annotate(
            f"{name} peak {peak:.0f}",
            (highest, peak),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_MUTED,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
            zorder=1,
        )
    top = max(peaks.values())
    axes.plot([lowest, top / bandwidth], [lowest * bandwidth, top], color=_MUTED, linewidth=1.1)
    axes.text(
        lowest * 1.05,
        lowest * 1.05 * bandwidth * 1.12,
        f"memory {bandwidth:.1f} GB/s",
        rotation=math.degrees(math.atan(bandwidth)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        fontsize=8,
        color=_MUTED,
    )
    floor = min(result["gmacs"] for result in results)
    axes.set_ylim(min(floor, lowest * bandwidth) / 1.5, top * 1.6)
    axes.set_xlim(lowest, highest)


def _draw_series(axes: Any, label: str, points: list[dict[str, Any]], index: int) -> None:
    points = sorted(points, key=lambda point: point["tokens"])
    color = _COLORS[index % len(_COLORS)]
    x = [_intensity(point) for point in points]
    y = [point["gmacs"] for point in points]
    marker = _MARKERS[index // len(_COLORS) % len(_MARKERS)]
    axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.2, label=label)
    if index == 0:
        for group in _close_together(points):
            tokens = ", ".join(str(point["tokens"]) for point in group)
            axes.annotate(
                f"T={tokens}",
                (_intensity(group[-1]), group[-1]["gmacs"]),
                xytext=(5, -11),
                textcoords="offset points",
                fontsize=8,
                color=color,
            )


def _close_together(points: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbours whose labels would overlap share one."""
    groups: list[list[dict[str, Any]]] = []
    for point in points:
        if groups and _intensity(point) < 1.3 * _intensity(groups[-1][0]):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups
