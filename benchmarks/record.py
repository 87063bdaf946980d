"""Records benchmark runs on this machine: JSON and plots in results/, tables in the pages that quote them.

python benchmarks/record.py layer          # run one group, then write the page
python benchmarks/record.py --all          # run every group
python benchmarks/record.py --page         # write the page anew from results/
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from endurance import write_long_runs
from page import write_page
from runs import GROUPS, RUNS
from summary import write_summary

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE / "README.md"
README = HERE.parent / "README.md"
LONG_RUNS = HERE.parent / "docs" / "long-runs.md"


def record(name: str) -> None:
    """Runs ``name`` and keeps its JSON, with the command as a user would type it, and its plot."""
    run = RUNS[name]
    path = RESULTS / f"{name}.json"
    command = [sys.executable, "-m", "jax_w4a8", "bench", *run.arguments.split(), "--json", str(path)]
    if run.plot:
        command += ["--plot", str(RESULTS / f"{name}.png")]
    print(f"== {name}: {run.arguments}", flush=True)
    subprocess.run(command, check=True)
    found = json.loads(path.read_text())
    found["command"] = f"python -m jax_w4a8 bench {run.arguments}"
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--all", action="store_true", help="every group")
    parser.add_argument("--page", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    unknown = set(arguments.groups) - set(GROUPS)
    if unknown:
        parser.error(f"group must be one of {', '.join(GROUPS)}, got {', '.join(sorted(unknown))}")
    if not (arguments.groups or arguments.all or arguments.page):
        parser.error("name groups, or --all, or --page")
    RESULTS.mkdir(exist_ok=True)
    if not arguments.page:
        chosen = GROUPS if arguments.all else arguments.groups
        for name, run in RUNS.items():
            if run.group in chosen:
                record(name)
    write_page(PAGE, RESULTS)
    write_summary(README, RESULTS)
    write_long_runs(LONG_RUNS, RESULTS)


if __name__ == "__main__":
    main()
