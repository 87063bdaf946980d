"""How a trial begins and ends: where and when it ran; what it found is printed and kept."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_w4a8.bench.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
#: Options that only say where on this machine to write.
PLACES = ("--json", "--found")


def circumstances() -> dict[str, Any]:
    """What figures must be read against; looked up as a trial begins, since much is committed in an hour."""
    return {
        "command": command(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "revision": revision(),
        "machine": Machine.here().as_dict(),
    }


def command(words: Sequence[str]) -> str:
    """A script and its arguments as one types them in the repository, without places to write to."""
    script = Path(words[0]).resolve()
    kept = ["python", str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name]
    after_place = False
    for word in words[1:]:
        if not after_place and word.split("=")[0] not in PLACES:
            kept.append(word)
        after_place = not after_place and word in PLACES
    return shlex.join(kept)


def revision(root: Path = ROOT) -> str | None:
    """Git's short hash of what is checked out, "-dirty" behind it if files differ; None without git."""
    if not (root / ".git").exists():  # or else git would find a repository that this one's files lie in
        return None
    look = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(look, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def report(head: Mapping[str, Any], found: Mapping[str, Any], path: Path | None) -> int:
    """Prints what was found as JSON, its circumstances first, and writes it to ``path`` if there is one.

    Returns:
      The exit code: 1 where ``found`` has ``faults``, else 0.
    """
    text = json.dumps({**head, **found}, indent=1)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return 1 if found["faults"] else 0
