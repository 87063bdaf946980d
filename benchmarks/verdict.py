"""How a trial ends: what it found is printed, kept, and decides on the exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report(found: Mapping[str, Any], path: Path | None) -> int:
    """Prints ``found`` as JSON, writes it to ``path`` if there is one; 1 where it has ``faults``, else 0."""
    text = json.dumps(found, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")
    return 1 if found["faults"] else 0
