"""The benchmark measures what it says: its arithmetic, its inputs, its refusals."""

import argparse
import json

import numpy as np
import pytest

from jax_w4a8 import native_available
from jax_w4a8.bench import command, layers, shapes

pytestmark = pytest.mark.skipif(not native_available(), reason="needs the native extension")

TINY = shapes.LayerShape(num_experts=6, top_k=2, hidden_size=64, intermediate_size=32)


class FixedLimits:
    threads = 1

    def peak_macs(self):
        return 1e9

    def bandwidth(self):
        return 1e8


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_figures_follow_from_time_and_sizes(monkeypatch):
    bench = layers.LayerBench(TINY, 32, layers=2)
    monkeypatch.setattr(bench, "_time", lambda call, arguments: 0.5)
    measured = bench.run(100, "uniform", FixedLimits(), repetitions=3)
    macs = 100 * 2 * 3 * 64 * 32 / 0.5
    assert measured.gmacs == pytest.approx(macs / 1e9)
    assert measured.share_of_peak == pytest.approx(macs / 1e9)
    experts = layers.random_experts(TINY, 32, 0)
    nbytes = experts.nbytes + 4 * 100 * 2 * 64  # 100 tokens meet all 6 experts
    assert measured.gbytes == pytest.approx(nbytes / 0.5 / 1e9)
    assert measured.share_of_bandwidth == pytest.approx(nbytes / 0.5 / 1e8)
    assert measured.share_of_bound == max(measured.share_of_peak, measured.share_of_bandwidth)


@pytest.mark.parametrize("name", layers.BASELINES)
def test_baselines_compute_the_same_layer(name):
    bench = layers.LayerBench(TINY, 32, layers=1)
    baseline = layers.BASELINES[name]
    (arguments, _) = next(bench._inputs(bench.layers, 20, "uniform"))
    expected = np.asarray(layers.NATIVE.call(*arguments))
    found = np.asarray(baseline.call(*arguments[:3], baseline.prepare(bench.layers)[0]))
    # Float activations differ by what INT8 costs.
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("group_size", [-1, 32])
def test_random_layers_differ_and_run(group_size):
    first, second = (layers.random_experts(TINY, group_size, seed) for seed in (0, 1))
    assert not np.array_equal(first.w13.codes, second.w13.codes)
    assert not np.array_equal(first.w2.codes, second.w2.codes)


@pytest.mark.parametrize("routing", layers.ROUTINGS)
def test_ids_are_distinct_within_a_token(routing):
    ids = layers.random_ids(TINY, 50, routing, np.random.default_rng(0))
    assert ids.shape == (50, 2)
    assert ids.min() >= 0
    assert ids.max() < TINY.num_experts
    assert (ids[:, 0] != ids[:, 1]).all()
    distinct = len(np.unique(ids))
    assert distinct == (2 if routing == "one" else TINY.num_experts)


def test_command_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setattr(command, "Limits", lambda threads: FixedLimits())
    path = tmp_path / "out.json"
    words = "--shape tiny --group-size 32 --tokens 1 3 --repetitions 1 --layers 2 --json"
    arguments = _arguments(*words.split(), str(path))
    assert command.run(arguments) == 0
    record = json.loads(path.read_text())
    assert [(r["shape"], r["tokens"]) for r in record["results"]] == [("tiny", 1), ("tiny", 3)]
    assert record["machine"]["instruction_set"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("--shape nothing", ValueError, "shape must be one of .*qwen3-30b-a3b.*'nothing'"),
        ("--instruction-set sse9", ValueError, "instruction set must be one of .*'sse9'"),
        ("--tokens 0", ValueError, "tokens must be at least 1, got 0"),
        ("--group-size 7", ValueError, "group_size must be .*got 7"),
        ("--layers 100000", MemoryError, "100000 layers of qwen3-30b-a3b need about .* GiB are free"),
    ],
)
def test_refusals_come_before_any_work(words, error, message, monkeypatch):
    monkeypatch.setattr(command, "Limits", None)
    with pytest.raises(error, match=message):
        command.run(_arguments(*words.split()))
