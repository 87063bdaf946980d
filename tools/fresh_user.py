"""Times a new user's first minutes in a clone of its own: README's first command, then the quick start.

Steps are read from the pages, so that what is timed is what they say. pip takes packages from its cache where
it has them. Processor minutes, of all cores together, say what a busy machine hides.

    python3 tools/fresh_user.py
"""

from __future__ import annotations

import re
import resource
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page of this repository."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def steps() -> list[tuple[str, str, str]]:
    """What the user gets, where it stands, and the shell commands."""
    layer, flax, _ = blocks("docs/quickstart.md", "python")
    run = ".venv/bin/python - <<'END_OF_CODE'\n{}END_OF_CODE\n"
    return [
        ("a clone", "git clone", f"git clone --quiet '{ROOT}' ."),
        ("first generated text", "README.md, first command", blocks("README.md", "sh")[0]),
        ("first quantised layer of one's own", "docs/quickstart.md, first code", run.format(layer)),
        (
            "first quantised Flax model of one's own",
            "docs/quickstart.md, both codes",
            run.format(layer + flax),
        ),
    ]


def processor_seconds() -> float:
    """Of all processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Runs all steps and prints a table of minutes."""
    rows, start = [], time.monotonic()
    with tempfile.TemporaryDirectory() as clone:
        for gets, where, commands in steps():
            began, used = time.monotonic(), processor_seconds()
            subprocess.run(["bash", "-euc", commands], cwd=clone, check=True)
            now = time.monotonic()
            seconds = (now - began, processor_seconds() - used, now - start)
            rows.append((gets, where, *(f"{one / 60:.2f}" for one in seconds)))
    print("\n| what the user has | by | minutes | processor minutes | minutes since the start |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
