"""The fuzz targets, shortly: what they start from, seeded damage, and every fault that they found.

``python -m tests.fuzz TARGET CORPUS`` goes on for as long as one likes.
"""

from __future__ import annotations

import pytest

from .checkpoints import DATA
from .fuzz.mutate import mutate
from .fuzz.targets import FAMILIES, FILES, TARGETS, clean_up, faulty, read_directory, scratch

FAULTS = sorted((DATA / "faults").iterdir())
ROUNDS = {"directory": 250, "gguf": 100, "packed": 1500, "tokenizer": 100, "chat": 100}


@pytest.fixture(scope="module", autouse=True)
def _clean():
    yield
    clean_up()


def seeds_of(name: str) -> list[bytes]:
    if name == "gguf":
        pytest.importorskip("gguf")
    if name == "chat":
        pytest.importorskip("jinja2")
    return list(TARGETS[name][1]())


def test_every_target_reads_what_is_whole(monkeypatch):
    """Nothing that a target starts from is refused: fuzzing begins behind every check."""
    monkeypatch.setattr("tests.fuzz.targets.CheckpointError", KeyError)
    for seed in seeds_of("directory"):
        read_directory(seed)
    assert len(seeds_of("directory")) == len(FAMILIES) * len(FILES)


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_damage(name):
    target, starts = TARGETS[name][0], seeds_of(name)
    for seed in range(ROUNDS[name]):
        data = mutate(starts[seed % len(starts)], seed)
        error = faulty(target, data)
        assert error is None, f"seed {seed}: {error!r}"


@pytest.mark.parametrize("file", FAULTS, ids=lambda file: file.name)
def test_faults_that_fuzzing_found(file):
    """Each is named TARGET-KIND-PLACE, as it was found."""
    name = file.name.split("-")[0]
    seeds_of(name)
    assert faulty(TARGETS[name][0], file.read_bytes()) is None


def test_the_scratch_directory_is_this_process_s_own():
    assert scratch() == scratch()
    assert scratch().is_dir()
