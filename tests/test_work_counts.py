"""Guards against regressions that need no clock: instructions, items of work and their balance, barriers.

Budgets are in ``data/instruction_budgets.json``, by instruction set. A change that is meant to cost more (or
saves so much that the budget no longer guards anything) updates them:

    python tests/test_work_counts.py
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jax_w4a8 import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="needs the native extension")

BUDGETS = Path(__file__).parent / "data" / "instruction_budgets.json"
#: tokens, top_k, experts, hidden, intermediate, group width
CASES = {
    "one token, g 128": (1, 4, 8, 512, 256, 128),
    "one token, g 32": (1, 4, 8, 512, 256, 32),
    "four tokens, g 128": (4, 4, 8, 512, 256, 128),
    "48 tokens, g 128": (48, 4, 8, 512, 256, 128),
    "48 tokens, g 32": (48, 4, 8, 512, 256, 32),
    "48 tokens, channel-wise": (48, 4, 8, 512, 512, 512),
}
#: Compilers differ by more than what a regression must be told from.
SAME_COMPILER, OTHER_COMPILER = 1.05, 1.4
#: Below this share of a budget it guards nothing any more.
STALE = 0.7
_COUNTED = "jax_w4a8_counted_call"
_PROGRAM = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
for case in json.loads(sys.argv[2]):
    native.moe_probe(*case, 1)
print(json.dumps([native.instruction_set(), native.compiler]))
"""


def count_instructions() -> tuple[str, str, dict[str, int]]:
    """Instruction set, compiler, and instructions of every case, in one process without JAX."""
    from jax_w4a8 import _native

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        command = [
            "valgrind",
            "--tool=callgrind",
            "--collect-atstart=no",
            f"--toggle-collect={_COUNTED}",
            f"--dump-after={_COUNTED}",
            f"--callgrind-out-file={out}",
            sys.executable,
            *("-S", "-E", "-c", _PROGRAM, _native.__file__, json.dumps(list(CASES.values()))),
        ]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
        name, compiler = json.loads(printed)
        totals = [
            int(re.search(r"^totals: (\d+)", Path(f"{out}.{i + 1}").read_text(), re.MULTILINE)[1])
            for i in range(len(CASES))
        ]
    return name, compiler, dict(zip(CASES, totals, strict=True))


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_instructions_stay_within_budget():
    name, compiler, counts = count_instructions()
    budgets = json.loads(BUDGETS.read_text())
    if name not in budgets:
        pytest.skip(f"no budgets for {name}, which valgrind gives the process here")
    recorded = budgets[name]
    margin = SAME_COMPILER if recorded["compiler"] == compiler else OTHER_COMPILER
    over = {case: count for case, count in counts.items() if count > margin * recorded["counts"][case]}
    stale = {
        case: count for case, count in counts.items() if count < STALE * recorded["counts"][case] / margin
    }
    assert not over, f"{over} exceed budgets {recorded['counts']} by more than {margin - 1:.0%}"
    assert not stale, f"{stale} are far below budgets {recorded['counts']}: run {Path(__file__).name}"


def _plan(counts, threads, *, blocks=96, groups=16, width=128):
    from jax_w4a8 import _native

    items = _native.plan_probe(blocks, groups, width, counts, threads)
    _check_cover(items, counts, blocks)
    return items


def _check_cover(items, counts, blocks):
    """Every row of every matrix meets every block exactly once."""
    covered = {}
    for matrix, begin, rows, first, last in items:
        for row in range(begin, begin + rows):
            for block in range(first, last):
                covered[matrix, row, block] = covered.get((matrix, row, block), 0) + 1
    starts = [sum(counts[:i]) for i in range(len(counts))]
    expected = {
        (matrix, start + row, block)
        for matrix, (start, count) in enumerate(zip(starts, counts, strict=True))
        for row in range(count)
        for block in range(blocks)
    }
    assert set(covered) == expected
    assert set(covered.values()) <= {1}


def _longest_share(items, threads):
    """The share that the busiest of ``threads`` takes, over an even share, when each takes the next item.

    An item costs its blocks, and its rows once more than an eighth of them.
    """
    loads = [0.0] * threads
    for _, _, rows, first, last in items:
        loads[loads.index(min(loads))] += (last - first) * (1 + rows / 8)
    return max(loads) * threads / sum(loads)


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize(
    ("counts", "most_items"),
    [
        ([1], 64),  # one token on one expert
        ([1] * 8, 160),  # one token, top 8
        ([0, 0, 200, 0], 160),  # one hot expert
        ([100, 50, 33, 25, 20, 17, 14, 12, 11, 10, 9, 8, 8, 7, 7, 6], 400),  # Zipf
    ],
    ids=["one row", "one token", "one hot expert", "skewed"],
)
def test_work_is_shared_evenly(counts, most_items, threads):
    items = _plan(counts, threads)
    assert threads <= len(items) <= most_items
    assert _longest_share(items, threads) < (1.15 if threads == 2 else 1.35)


def test_little_work_is_not_cut_up():
    assert len(_plan([1], 2, blocks=4, groups=1, width=32)) == 1


@pytest.mark.parametrize(
    ("case", "most_phases"),
    [((1, 8, 16, 2048, 768, 128), 2), ((64, 8, 16, 2048, 768, 128), 5), ((256, 1, 2, 512, 256, 32), 5)],
    ids=["one token", "many tokens", "one expert a token"],
)
def test_a_call_has_a_handful_of_barriers(case, most_phases):
    from jax_w4a8 import _native

    assert 1 <= _native.moe_probe(*case, 2) <= most_phases


def _update() -> None:
    name, compiler, counts = count_instructions()
    budgets = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    budgets[name] = {"compiler": compiler, "counts": counts}
    BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")
    print(BUDGETS.read_text())


if __name__ == "__main__":
    _update()
