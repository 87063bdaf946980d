"""What the kernel is meant to reach, beside what recorded runs say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Row = Mapping[str, Any]

OURS = "cpu_int4"
_FEW = (1, 4, 16)
_ALL = (*_FEW, 64, 256, 1024)
_SHAPES = ("qwen3-g128", "olmoe-g128", "gpt-oss-20b-g32", "deepseek-v2-lite-g128", "mixtral-8x7b-g128")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
      case: what is measured.
      goal: the least that it should be; the most where ``below``.
      found: by our instruction sets' names.
      percent: whether figures are shares rather than ratios.
    """

    case: str
    goal: float
    found: Mapping[str, float]
    percent: bool = False
    below: bool = False

    def cells(self, names: Sequence[str]) -> list[str]:
        """Text: the case, the goal, and what each instruction set reached."""
        bound = "at most " if self.below else ""
        return [
            self.case,
            bound + self._text(self.goal),
            *(self._text(self.found[n]) if n in self.found else "" for n in names),
        ]

    def _text(self, value: float) -> str:
        return f"{value:.0%}" if self.percent else f"{value:.2f}x"


def _rows(record: Record, **wanted: Any) -> list[Row]:
    return [row for row in record["results"] if all(row[key] == value for key, value in wanted.items())]


def _ours(record: Record, value: Callable[[Row], float], **wanted: Any) -> dict[str, float]:
    """A figure of our rows, by instruction set."""
    return {row["variant"]: value(row) for row in _rows(record, implementation=OURS, **wanted)}


def _shares(
    records: Mapping[str, Record], name: str, what: str, key: str, goals: Mapping[int, float], **wanted: Any
) -> Iterator[Figure]:
    if name not in records:
        return
    for tokens, goal in goals.items():
        found = _ours(records[name], lambda row: row[key], tokens=tokens, **wanted)
        yield Figure(f"{what}, T={tokens}", goal, found, percent=True)


def ratios(
    record: Record, tokens: int, chosen: Callable[[Row], bool] = lambda row: True, **wanted: Any
) -> dict[str, float]:
    """How much faster we are than the fastest of the chosen others, by instruction set; empty without any."""
    rows = _rows(record, tokens=tokens, **wanted)
    others = [row["milliseconds"] for row in rows if row["implementation"] != OURS and chosen(row)]
    ours = [row for row in rows if row["implementation"] == OURS] if others else []
    return {row["variant"]: min(others) / row["milliseconds"] for row in ours}


def model_ratios(record: Record, key: str) -> float:
    """How many times the fastest peer's rate of a whole model ours is."""
    ours, *others = record["results"]
    return float(ours[key] / max(other[key] for other in others))


def _against(
    records: Mapping[str, Record],
    name: str,
    what: str,
    goals: Mapping[int, float],
    chosen: Callable[[Row], bool] = lambda row: True,
    **wanted: Any,
) -> Iterator[Figure]:
    if name not in records:
        return
    for tokens, goal in goals.items():
        if found := ratios(records[name], tokens, chosen, **wanted):
            yield Figure(f"against {what}, T={tokens}", goal, found)


def _layer(records: Mapping[str, Record]) -> Iterator[Figure]:
    uniform = {"routing": "uniform"}
    for name, what, goals in (
        ("qwen3-g128", "g 128", {1024: 0.85, 256: 0.75}),
        ("qwen3-g32", "g 32", {1024: 0.75, 256: 0.65}),
        ("qwen3-channel", "channel-wise", {1024: 0.88, 256: 0.78}),
    ):
        yield from _shares(records, name, f"of peak, {what}", "share_of_peak", goals, **uniform)
    for name in _SHAPES:
        yield from _shares(records, name, f"of bandwidth, {name}", "share_of_bandwidth", {1: 0.9}, **uniform)
        goals = {4: 0.85, 16: 0.85}
        yield from _shares(records, name, f"of the tighter bound, {name}", "share_of_bound", goals, **uniform)
    if "qwen3-g128" in records:
        one, even = (
            _ours(records["qwen3-g128"], lambda row: row["milliseconds"], tokens=1024, routing=routing)
            for routing in ("one", "uniform")
        )
        slower = {name: one[name] / even[name] for name in one if name in even}
        yield Figure("all tokens on one expert over uniform, T=1024", 1.1, slower, below=True)
    if "qwen3-threads" in records:
        single, double = (
            _ours(records["qwen3-threads"], lambda row: row["milliseconds"], tokens=1024, threads=threads)
            for threads in (1, 2)
        )
        faster = {name: single[name] / double[name] for name in single if name in double}
        yield Figure("two threads over one, T=1024", 1.85, faster)
    yield from _shares(records, "qwen3-avx2", "of AVX2's own peak", "share_of_peak", {1024: 0.7})
    yield from _shares(records, "qwen3-avx2", "of bandwidth by AVX2", "share_of_bandwidth", {1: 0.9})


def _peers(records: Mapping[str, Record]) -> Iterator[Figure]:
    def starts(text: str) -> Callable[[Row], bool]:
        return lambda row: row["variant"].startswith(text)

    llama = "peer-llamacpp"
    yield from _against(records, llama, "llama.cpp Q4_0 repacked", {1024: 5.0}, starts("Q4_0"))
    yield from _against(records, llama, "llama.cpp Q4_K", {1024: 2.3}, starts("Q4_K"))
    yield from _against(records, llama, "llama.cpp's fastest", dict.fromkeys((*_FEW, 64, 256), 1.2))
    goals = {1024: 1.4, 256: 1.5, **dict.fromkeys((64, 16, 4, 1), 3.0)}
    yield from _against(records, "peer-zentorch", "zentorch", goals)
    for group in (128, 32):
        goals = {1024: 2.3, 256: 2.0, 64: 2.0, 16: 2.0, 1: 1.5}
        name = f"peer-onnxruntime-g{group}"
        yield from _against(records, name, f"ONNX Runtime QMoE, g {group}", goals)
    for group, goal in ((32, 1.25), (128, 1.1)):
        goals = {1: 1.0, **dict.fromkeys((64, 256, 1024), goal)}
        what = f"the best of OpenVINO and ONNX Runtime, linear, g {group}"
        yield from _against(records, "linear", what, goals, group_size=group)
    goals = {1024: 3.5, **dict.fromkeys(_ALL[:-1], 5.0)}
    yield from _against(records, "pure-jax", "the best pure JAX", goals)


def _model(records: Mapping[str, Record]) -> Iterator[Figure]:
    recorded = [records[name] for name in ("model-llamacpp", "model-llamacpp-best") if name in records]
    for key, what, goal in (("decode_rate", "decode", 1.2), ("prefill_rate", "prefill", 3.0)):
        found = {record["instruction_set"]: model_ratios(record, key) for record in recorded}
        yield Figure(f"whole model against llama.cpp, {what}", goal, found)


def target_table(records: Mapping[str, Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; no rows where nothing has been recorded that has a target."""
    figures = [figure for figure in (*_layer(records), *_peers(records), *_model(records)) if figure.found]
    names = list(dict.fromkeys(name for figure in figures for name in figure.found))
    return ["case", "target", *names], [figure.cells(names) for figure in figures]
