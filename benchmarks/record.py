"""Records the benchmark runs of README.md on this machine: JSON files in results/, tables in README.md.

python benchmarks/record.py            # run everything, then write the tables
python benchmarks/record.py --tables   # write the tables anew from results/
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "README.md"
MARK = "<!-- tables: written by record.py -->"

RUNS: dict[str, str] = {
    "qwen3-30b-a3b-g128": "--group-size 128 --routing uniform one",
    "qwen3-30b-a3b-g32": "--group-size 32",
    "qwen3-30b-a3b-channel": "--group-size -1",
    "qwen3-30b-a3b-g128-avx2": "--group-size 128 --tokens 1 1024 --instruction-set avx2",
    "qwen3-30b-a3b-g128-1thread": "--group-size 128 --tokens 1 1024 --threads 1",
    "qwen3-30b-a3b-g128-baselines": (
        "--group-size 128 --tokens 1 16 --layers 1 --repetitions 3 --baseline xla ragged_dot"
    ),
    "olmoe-g128": "--shape olmoe --tokens 1 16 1024",
    "gpt-oss-20b-g32": "--shape gpt-oss-20b --group-size 32 --tokens 1 16 1024",
    "deepseek-v2-lite-g128": "--shape deepseek-v2-lite --tokens 1 16 1024",
    "mixtral-8x7b-g128": "--shape mixtral-8x7b --tokens 1 16 1024",
}


def _record(name: str, arguments: str) -> None:
    path = RESULTS / f"{name}.json"
    command = [sys.executable, "-m", "jax_w4a8", "bench", *arguments.split(), "--json", str(path)]
    subprocess.run(command, check=True)
    record = json.loads(path.read_text())
    record["command"] = f"python -m jax_w4a8 bench {arguments}"
    path.write_text(json.dumps(record, indent=1) + "\n")


def _table(record: dict[str, Any]) -> str:
    machine = record["machine"]
    lines = [
        f"`{record['command']}`, {record['date']}: {machine['cpu']}, {record['threads']} threads, "
        f"{machine['instruction_set']}, jax {machine['jax']}",
        "",
        "| shape | implementation | routing | T | ms | G MAC/s | of peak | GB/s | of bandwidth | of bound |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in record["results"]:
        shares = [row["share_of_peak"], row["share_of_bandwidth"]]
        lines.append(
            f"| {row['shape']}, g {row['group_size']} | {row['implementation']} | {row['routing']} "
            f"| {row['tokens']} | {row['milliseconds']:.2f} | {row['gmacs']:.0f} | {shares[0]:.0%} "
            f"| {row['gbytes']:.1f} | {shares[1]:.0%} | {max(shares):.0%} |"
        )
    return "\n".join(lines)


def _write_tables() -> None:
    tables = [_table(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    head = PAGE.read_text().split(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n\n" + "\n\n".join(tables) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="only write the tables")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    arguments = parser.parse_args()
    if not arguments.tables:
        RESULTS.mkdir(exist_ok=True)
        for name in arguments.only:
            _record(name, RUNS[name])
    _write_tables()


if __name__ == "__main__":
    main()
