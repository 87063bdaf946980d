"""Writes the page of recorded benchmarks from their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs import RUNS
from targets import OURS, target_table

#: What stands before the first table is written by hand.
MARK = "<!-- tables: written by record.py -->"


def read_records(results: Path) -> dict[str, Any]:
    """The recorded runs, by name."""
    return {
        name: json.loads(path.read_text()) for name in RUNS if (path := results / f"{name}.json").exists()
    }


def write_page(page: Path, results: Path) -> None:
    """Replaces all that follows the mark."""
    records = read_records(results)
    sections = [_section(name, record, results) for name, record in records.items()]
    header, rows = target_table(records)
    if rows:
        lines = ["## Targets", "", "By our instruction set; shares and ratios of one run each.", ""]
        sections.insert(0, "\n".join([*lines, *table(header, rows, 1)]))
    packing = results / "packing" / "qwen3-30b-a3b.json"
    if packing.exists():
        sections.append(_packing_section(json.loads(packing.read_text())))
    head = page.read_text().split(MARK)[0]
    page.write_text("\n\n".join([head + MARK, *sections]) + "\n")


def _section(name: str, record: dict[str, Any], results: Path) -> str:
    lines = [f"## {RUNS[name].question}", "", _circumstances(record), ""]
    lines += _model_tables(record) if "model" in record else _layer_tables(record)
    if (results / f"{name}.png").exists():
        lines += ["", f"![roofline](results/{name}.png)"]
    return "\n".join(lines)


def run_line(record: Mapping[str, Any]) -> str:
    """The command of a recorded run, its day and its machine."""
    machine = record["machine"]
    text = f"`{record['command']}`, {record['date']}: {machine['cpu']}, {machine['memory_gib']} GiB, "
    return text + f"{machine['threads']} threads"


def _groups(size: int) -> str:
    return "channel-wise" if size < 0 else f"g {size}"


def _circumstances(record: dict[str, Any]) -> str:
    limits = record["limits"]
    text = f"{run_line(record)}, jax {record['machine']['jax']}"
    text += "".join(f", {name} {version}" for name, version in record["peers"].items())
    bandwidth = ", ".join(f"{rate:.1f} GB/s on {n}" for n, rate in limits["bandwidth_gbytes"].items())
    peaks = ", ".join(
        f"{name} {', '.join(f'{rate:.0f} on {n}' for n, rate in rates.items())}"
        for name, rates in limits["peak_gmacs"].items()
    )
    text += f". Limits in that run, by threads: {bandwidth}"
    return f"{text}; G MAC/s {peaks}." if peaks else f"{text}."


def _packing_section(record: dict[str, Any]) -> str:
    results = record["packing"]
    threads = sorted({row["threads"] for row in results})
    cases: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for row in results:
        cases.setdefault((row["group_size"], row["source"]), {})[row["threads"]] = row
    rows = []
    for (group, source), by_threads in cases.items():
        speeds = [f"{by_threads[n]['gbytes_per_second']:.2f}" if n in by_threads else "" for n in threads]
        extra = max(row["extra_gbytes"] for row in by_threads.values())
        rows.append((_groups(group), source, *speeds, f"{1e3 * extra:.0f}"))
    header = ("groups", "source", *(f"GB/s, threads: {n}" for n in threads), "MB of memory beside")
    text = f"{run_line(record)}. GB/s of packed output, medians; {record['experts']} experts of "
    text += f"{record['shape']}. numpy is what packs codes without the extension."
    return "\n".join(["## Packing", "", text, "", *table(header, rows, 2)])


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    rule = ["---"] * text_columns + ["--:"] * (len(header) - text_columns)
    return ["| " + " | ".join(row) + " |" for row in (header, rule, *rows)]


def _layer_tables(record: dict[str, Any]) -> list[str]:
    header = ("work", "implementation", "routing", "threads", "T", "ms", "G MAC/s", "of peak", "GB/s")
    header += ("of bandwidth", "tighter bound", "of it", "ours is faster by")
    ours = {_case(row): row for row in reversed(record["results"]) if row["implementation"] == OURS}
    rows = []
    for row in record["results"]:
        ratio = row["milliseconds"] / ours[_case(row)]["milliseconds"]
        rows.append(
            (
                f"{row['work']}, {_groups(row['group_size'])}",
                f"{row['implementation']} {row['variant']}".strip(),
                row["routing"],
                str(row["threads"]),
                str(row["tokens"]),
                f"{row['milliseconds']:.3f}",
                f"{row['gmacs']:.0f}",
                f"{row['share_of_peak']:.0%}",
                f"{row['gbytes']:.1f}",
                f"{row['share_of_bandwidth']:.0%}",
                row["bound"],
                f"{row['share_of_bound']:.0%}",
                "" if row["implementation"] == OURS else f"{ratio:.2f}x",
            )
        )
    return table(header, rows, 3)


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("work", "group_size", "routing", "threads", "tokens"))


def _model_tables(record: dict[str, Any]) -> list[str]:
    header = ("implementation", "prefill tokens/s", "ms per token", "decode tokens/s", "of bandwidth")
    rows = [
        (
            row["implementation"],
            f"{row['prefill_rate']:.1f}",
            f"{row['step_milliseconds']:.2f}",
            f"{row['decode_rate']:.2f}",
            f"{row['step_bandwidth_share']:.0%}",
        )
        for row in record["results"]
    ]
    case = record["model"]
    lines = [
        f"Prompt of {case['prompt_tokens']} tokens, then {case['decode_tokens']} more; "
        f"{record['weight_bytes'] / 1e9:.2f} GB of weights made in {record['build_seconds']:.0f} s.",
        "",
        *table(header, rows, 1),
        "",
        "Where our time goes:",
        "",
    ]
    step, prefill, must_read = (
        record[key] for key in ("step_milliseconds", "prefill_milliseconds", "must_read_bytes")
    )
    total, whole = sum(step.values()), sum(prefill.values())
    parts = [
        (
            part,
            f"{step[part]:.2f}",
            f"{step[part] / total:.1%}",
            f"{must_read[part] / 1e6:.1f}",
            f"{prefill[part]:.1f}",
            f"{prefill[part] / whole:.1%}",
        )
        for part in step
    ]
    parts.append(("all", f"{total:.2f}", "", f"{sum(must_read.values()) / 1e6:.1f}", f"{whole:.1f}", ""))
    return lines + table(
        ("part", "decode step, ms", "share", "MB it must read", "prefill, ms", "share"), parts, 1
    )
