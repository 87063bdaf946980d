"""Times a new user's first minutes in a clone of its own: README's first command, then the quick start.

Steps are read from the pages, so that what is timed is what they say. pip takes packages from its cache where
it has them.

    python3 tools/fresh_user.py
"""

from __future__ import annotations

import re
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
        ("first quantised Flax model of one's own", "docs/quickstart.md, second code", run.format(flax)),
    ]


def main() -> None:
    """Runs all steps and prints a table of minutes."""
    rows, start = [], time.monotonic()
    with tempfile.TemporaryDirectory() as clone:
        for gets, where, commands in steps():
            began = time.monotonic()
            subprocess.run(["bash", "-euc", commands], cwd=clone, check=True)
            now = time.monotonic()
            rows.append((gets, where, f"{(now - began) / 60:.2f}", f"{(now - start) / 60:.2f}"))
    print("\n| what the user has | by | minutes | since the start |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
