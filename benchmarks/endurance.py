"""Writes what hours of soak.py, recompile.py and tools/fuzz.py gave into the page about long runs.

Each writes its record where its ``--json results/long/NAME.json`` says; then ``record.py --page``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page import run_line, table
from summary import replace_figures

Record = Mapping[str, Any]


def write_long_runs(page: Path, results: Path) -> None:
    """Replaces what lies between the page's marks; a trial without a record in ``results/long`` is left out.

    Without any record all stays as it is.
    """
    trials = {"soak": _soak, "recompile": _recompile, "fuzz": _fuzz}
    paths = {name: results / "long" / f"{name}.json" for name in trials}
    parts = [trials[name](json.loads(path.read_text())) for name, path in paths.items() if path.exists()]
    if parts:
        replace_figures(page, parts)


def _part(record: Record, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A trial's circumstances, its table, and what was wrong."""
    line = f"{run_line(record)}, jax {record['machine']['jax']}"
    line += f", revision `{record['revision']}`." if record["revision"] else "."
    return [line, "", *table(header, rows, 1), *(f"\nFault: {fault}" for fault in record["faults"])]


def _soak(record: Record) -> list[str]:
    resident = record["resident"]
    rows = [
        ("minutes", f"{record['seconds'] / 60:g}", ""),
        ("threads that make requests", str(record["threads"]), ""),
        ("requests", f"{record['requests']:,}", ""),
        ("their tokens", f"{record['tokens']:,}", ""),
        ("changes of settings", f"{record['changes_of_settings']:,}", ""),
        ("results that differed", str(record["different_results"]), "0"),
        ("growth of resident memory, MiB", f"{resident['growth_mib']:.1f}", str(record["growth_bound_mib"])),
        (
            "growth of allocated memory, MiB",
            f"{resident['allocated_growth_mib']:.1f}",
            str(record["allocated_bound_mib"]),
        ),
        (
            "working memory kept, MiB",
            f"{record['most_scratch_mib']:.1f}",
            f"{record['scratch_bound_mib']:.1f}",
        ),
    ]
    return _part(record, ("soak.py", "found", "at most"), rows)


def _recompile(record: Record) -> list[str]:
    layer, control = record["layer"], record["control"]
    bound = control["bytes_per_compile"] + record["leak_bound_bytes"]
    rows = [
        ("compilations", f"{layer['compiles']:,}", f"{control['compiles']:,}", ""),
        ("minutes", f"{layer['seconds'] / 60:.1f}", f"{control['seconds'] / 60:.1f}", ""),
        (
            "bytes that each leaves",
            f"{layer['bytes_per_compile']:,.0f}",
            f"{control['bytes_per_compile']:,.0f}",
            f"{bound:,.0f}",
        ),
        ("changed results", str(layer["changed_results"]), "", "0"),
        (
            "working memory kept, bytes",
            f"{layer['scratch_bytes']:,}",
            "",
            f"{record['scratch_bound_bytes']:,}",
        ),
    ]
    return _part(record, ("recompile.py", "the layer", "pure-JAX control", "the layer at most"), rows)


def _fuzz(record: Record) -> list[str]:
    rows = [
        (
            f"`{target['name']}`",
            f"{target['inputs']:,}",
            f"{target['minutes']:.1f}",
            f"{target['cpu_minutes']:.1f}",
            str(len(target["faults"])),
        )
        for target in record["targets"]
    ]
    header = ("fuzz.py, target", "inputs", "minutes by the clock", "minutes of CPU", "faults")
    return _part(record, header, rows)
