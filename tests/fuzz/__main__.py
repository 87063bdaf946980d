"""Coverage-guided fuzzing of one target: ``python -m tests.fuzz TARGET CORPUS [options of libFuzzer]``.

Needs the ``atheris`` package. Goes on after a fault: each place where an exception escaped is written once,
as ``CORPUS/faults/PLACE``. Hangs, crashes and memory above libFuzzer's limits end it, as ever.
"""

from __future__ import annotations

import logging
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path

import atheris

# An editable installation's own loader hides modules from atheris; this folder goes before it.
sys.meta_path.remove(PathFinder)
sys.meta_path.insert(0, PathFinder)

with atheris.instrument_imports(include=["jax_w4a8.checkpoint", "jax_w4a8.models", "gguf"]):
    from tests.fuzz import mutate, targets


def _place(error: Exception) -> str:
    """The exception's kind and the package's innermost line in its trace."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "jax_w4a8" in frame.filename] or list(frames)
    return f"{type(error).__name__}-{Path(ours[-1].filename).stem}-{ours[-1].lineno}"


def main() -> None:
    """Runs until libFuzzer's options say so."""
    logging.getLogger("jax_w4a8").setLevel(logging.ERROR)
    name, corpus, *options = sys.argv[1:]
    target, seeds = targets.TARGETS[name]
    folder = Path(corpus)
    faults = folder / "faults"
    faults.mkdir(parents=True, exist_ok=True)
    starts = list(seeds())
    for number, start in enumerate(starts):
        (folder / f"seed-{number}").write_bytes(start)

    def run(data: bytes) -> None:
        error = targets.faulty(target, data)
        if error is None:
            return
        file = faults / _place(error)
        if not file.exists():
            file.write_bytes(data)
            print(f"FAULT {file.name}: {targets.describe(error)}", flush=True)

    def change(data: bytes, limit: int, seed: int) -> bytes:
        # libFuzzer keeps one of several inputs that take the same way; the whole files must stay in play.
        if seed % 4:
            changed = mutate.mutate(data if seed % 4 == 1 else starts[seed % len(starts)], seed)
            if len(changed) <= limit:
                return changed
        return atheris.Mutate(data, limit)

    atheris.Setup(
        [sys.argv[0], str(folder), f"-artifact_prefix={faults}/", *options], run, custom_mutator=change
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
