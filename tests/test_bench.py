"""The benchmark measures what it says: its arithmetic, its inputs, its baselines, its refusals."""

import argparse
import importlib.util
import json

import numpy as np
import pytest

from jax_w4a8 import native_available
from jax_w4a8.bench import command, measure, routings, shapes
from jax_w4a8.bench.baselines import BASELINES
from jax_w4a8.bench.implementations import Loaded, Native
from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.peers import PEERS
from jax_w4a8.bench.random_weights import packed_bytes, random_linear
from jax_w4a8.bench.work import LinearWork, MoEWork, cosine, round_of

pytestmark = pytest.mark.skipif(not native_available(), reason="needs the native extension")

TINY = MoEWork("tiny", shapes.LayerShape(num_experts=6, top_k=2, hidden_size=64, intermediate_size=32), 32)
LINEAR = LinearWork("linear", shapes.LinearShape(48, 64), 32)
#: Large enough for every peer's formats.
SMALL = MoEWork(
    "small", shapes.LayerShape(num_experts=4, top_k=2, hidden_size=256, intermediate_size=256), 32
)
SMALL_LINEAR = LinearWork("linear", shapes.LinearShape(64, 256), 32)


class FixedLimits:
    def peak_macs(self, threads, instruction_set=None):
        return 1e9

    def bandwidth(self, threads):
        return 1e8

    def sample(self, threads):
        pass

    def summary(self):
        rates = {name: {"1": 1.0, "2": 1.0} for name in ("avx2", "avx512_vnni")}
        return {"peak_gmacs": rates, "bandwidth_gbytes": {"1": 0.1, "2": 0.1}}


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_models_and_batch_sizes_that_others_publish_are_there():  # [F10] [F12]
    defaults = _arguments()
    assert {1, 16, 1024} <= set(defaults.tokens)
    assert {"qwen3-30b-a3b", "gpt-oss-20b", "olmoe", "mixtral-8x7b"} <= set(shapes.SHAPES)


def test_figures_follow_from_time_and_sizes(monkeypatch):  # [F5]
    layers = TINY.layers(2)
    bench = measure.Bench(TINY, [Native().load(TINY, layers, 1)], 2, 1, FixedLimits())
    ticks = iter(np.arange(100) * 1.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    (measured,) = bench.run(100, "uniform", repetitions=3)
    assert measured.milliseconds == 500  # a second for two layers
    macs = 100 * 2 * 3 * 64 * 32 / 0.5
    assert measured.gmacs == pytest.approx(macs / 1e9)
    assert measured.share_of_peak == pytest.approx(macs / 1e9)
    nbytes = layers[0].nbytes + 4 * 100 * 2 * 64  # 100 tokens meet all 6 experts
    assert measured.gbytes == pytest.approx(nbytes / 0.5 / 1e9)
    assert measured.share_of_bandwidth == pytest.approx(nbytes / 0.5 / 1e8)
    assert measured.share_of_bound == max(measured.share_of_peak, measured.share_of_bandwidth)
    assert measured.bound == "compute"


def test_few_tokens_touch_the_experts_that_they_chose():
    inputs = TINY.round(1, 2, 2, "uniform", np.random.default_rng(0))
    assert TINY.bytes_touched(inputs) == pytest.approx(TINY.layers(1)[0].nbytes * 2 / 6 + 2 * 4 * 64)


@pytest.mark.parametrize("routing", routings.ROUTINGS)
def test_a_layer_that_comes_again_has_other_experts(routing):
    work = MoEWork("many", shapes.LayerShape(32, 4, 64, 32), 32)
    inputs = work.round(2, 7, 2, routing, np.random.default_rng(0))
    for layer in range(2):
        for ids in inputs.ids[layer::2]:
            assert len(set(ids[0])) == len(set(ids[1])) == 4
            assert routing != "one" or (ids[0] == ids[1]).all()
        used = [expert for ids in inputs.ids[layer::2] for expert in np.unique(ids)]
        assert len(set(used)) == len(used)


def test_experts_that_were_used_longest_ago_come_first():
    work = MoEWork("few", shapes.LayerShape(6, 2, 64, 32), 32)
    used = work.round(1, 9, 1, "uniform", np.random.default_rng(0)).ids
    for before, after in zip(used, used[3:], strict=False):
        assert set(before[0]) == set(after[0])  # three steps use all six


def test_short_programs_pass_as_many_layers_as_the_model_has(monkeypatch):
    work = MoEWork("deep", shapes.LayerShape(6, 2, 64, 32, num_layers=5), 32)
    layers = work.layers(2)
    loaded = [Native().load(work, layers, 1), BASELINES["ragged_dot"].load(work, layers, 1)]
    ran = []
    for one in loaded:
        prepare = one.prepare
        monkeypatch.setattr(one, "prepare", lambda inputs, p=prepare: ran.append(inputs.steps) or p(inputs))
    bench = measure.Bench(work, loaded, 2, 1, FixedLimits())
    ours, theirs = bench.run(3, "uniform", repetitions=1)
    assert (ours.layers, ours.steps) == (2, 6)
    assert (theirs.layers, theirs.steps) == (1, 3)  # the first layer's alone
    assert set(ran) == {2, 6, 1, 3}  # the first ones are to find how long they take
    monkeypatch.setattr(measure, "_PROGRAM_SECONDS", 1e-9)
    long, _ = bench.run(3, "uniform", repetitions=1)
    assert long.steps == 2


def test_a_round_of_steps_is_a_chain_of_layers():
    layers = TINY.layers(2)
    inputs = TINY.round(3, 3, 2, "uniform", np.random.default_rng(0))
    native = Native().load(TINY, layers, 1)
    last = native._run(inputs.x, inputs.weights, inputs.ids, tuple(layers))
    third = round_of(inputs, [2])
    np.testing.assert_array_equal(np.asarray(last), native.first_output(third))  # layer 0 again


def test_limits_are_remembered_by_instruction_set_and_threads():
    limits = Limits(buffer_bytes=3 << 20, read_bytes=1 << 20)
    for _ in range(20):
        limits.sample(2)
    summary = limits.summary()
    from jax_w4a8.ffi import instruction_sets

    assert set(summary["peak_gmacs"]) == set(instruction_sets())
    assert set(summary["bandwidth_gbytes"]) == {"1", "2"}
    rates = [rate for by_threads in summary["peak_gmacs"].values() for rate in by_threads.values()]
    assert min(*rates, *summary["bandwidth_gbytes"].values()) > 0


@pytest.mark.parametrize("name", ["xla", "ragged_dot", "scan"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_baselines_compute_the_same_layer(name, tokens, monkeypatch):
    monkeypatch.setattr("jax_w4a8.bench.baselines._ROWS", (8,))
    layers = TINY.layers(1)
    inputs = TINY.round(tokens, 1, 1, "uniform", np.random.default_rng(0))
    expected = Native().load(TINY, layers, 1).first_output(inputs)
    found = BASELINES[name].load(TINY, layers, 1).first_output(inputs)
    # Float activations differ by what INT8 costs.
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def test_every_shape_of_scan_computes_the_same_layer():
    from jax_w4a8.bench import baselines

    layers = TINY.layers(1)
    inputs = TINY.round(40, 1, 1, "zipf", np.random.default_rng(0))
    expected = Native().load(TINY, layers, 1).first_output(inputs)
    matrices = baselines._int8_matrices(layers[0])
    for loaded in (
        baselines._Capacity(matrices),
        *(baselines.JaxLoaded("scan", baselines._by_blocks(rows), [matrices]) for rows in (1, 8, 64)),
    ):
        assert cosine(loaded.first_output(inputs), expected) > 0.999


def test_linear_baseline_computes_the_same():
    layers = LINEAR.layers(2)
    inputs = LINEAR.round(5, 2, 2, "uniform", np.random.default_rng(0))
    expected = Native().load(LINEAR, layers, 1).first_output(inputs)
    found = BASELINES["dot_bf16"].load(LINEAR, layers, 1).first_output(inputs)
    assert cosine(found, expected) > 0.999


class Wrong(Loaded):
    name = "wrong"
    num_layers = 1

    def prepare(self, inputs):
        return lambda: None

    def first_output(self, inputs):
        return np.ones_like(inputs.x)


def test_what_computes_something_else_is_not_timed():
    layers = TINY.layers(1)
    bench = measure.Bench(TINY, [Native().load(TINY, layers, 1), Wrong()], 1, 1, FixedLimits())
    with pytest.raises(RuntimeError, match=r"wrong .*doesn't compute the same layer"):
        bench.run(2, "uniform", 1)


@pytest.mark.parametrize("group_size", [32, -1])
def test_packed_bytes_are_those_of_packed_weights(group_size):
    for out_features, in_features in ((64, 64), (40, 80), (20, 70)):
        weights = random_linear(out_features, in_features, group_size, 0)
        assert packed_bytes(out_features, in_features, group_size) == weights.nbytes


@pytest.mark.parametrize("work", [TINY, LINEAR], ids=lambda work: work.name)
def test_random_layers_differ_everywhere(work):
    first, second = (np.asarray(layer.w13.codes if work is TINY else layer.codes) for layer in work.layers(2))
    assert np.mean(first == second) < 0.05
    if work is TINY:
        assert len({expert.tobytes() for expert in first}) == len(first)


@pytest.mark.parametrize("routing", routings.ROUTINGS)
def test_ids_are_distinct_within_a_token(routing):
    ids = routings.random_ids(6, 2, 50, routing, np.random.default_rng(0))
    assert ids.shape == (50, 2)
    assert ids.min() >= 0
    assert ids.max() < 6
    assert (ids[:, 0] != ids[:, 1]).all()
    assert len(np.unique(ids)) == (2 if routing == "one" else 6)


def test_zipf_is_skewed_and_uniform_is_not():
    def hottest(routing):
        ids = routings.random_ids(64, 4, 2000, routing, np.random.default_rng(0))
        return np.bincount(ids.ravel()).max() / (2000 * 4 / 64)

    assert hottest("uniform") < 1.5
    assert hottest("zipf") > 5


@pytest.mark.filterwarnings("ignore")  # peers' own, and JAX's about their forks
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("work", [SMALL, SMALL_LINEAR], ids=lambda work: work.name)
def test_installed_peers_compute_the_same(name, work):
    missing = [m for m in PEERS[name][0].modules if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"{missing} not installed")
    layers = work.layers(2)
    inputs = work.round(3, 2, 2, "uniform", np.random.default_rng(0))
    expected = Native().load(work, layers, 1).first_output(inputs)
    tried = 0
    for peer in PEERS[name]:
        if peer.refusal(work, 1) is None:
            loaded = peer.load(work, layers, 1)
            assert cosine(loaded.first_output(inputs), expected) > 0.99, loaded.variant
            loaded.prepare(inputs)()
            loaded.close()
            tried += 1
    if not tried:
        pytest.skip(f"{name} doesn't do this")


def test_command_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY.shape)
    monkeypatch.setattr(command, "Limits", FixedLimits)
    path = tmp_path / "out.json"
    words = "--shape tiny --linear 48x64 --group-size 32 --tokens 1 17 --repetitions 1 --layers 2"
    words += " --baseline ragged_dot --threads 1 2"
    assert command.run(_arguments(*words.split(), "--json", str(path))) == 0
    record = json.loads(path.read_text())
    found = [
        (r["work"], r["threads"], r["tokens"]) for r in record["results"] if r["implementation"] == "cpu_int4"
    ]
    works = ("tiny", "linear 48x64")
    counts = sorted({min(n, command.ffi.num_threads()) for n in (1, 2)})
    assert found == [(work, threads, tokens) for work in works for threads in counts for tokens in (1, 17)]
    beside = {r["work"] for r in record["results"] if r["implementation"] == "ragged_dot"}
    assert beside == {"tiny"}
    printed = capsys.readouterr().out
    assert record["machine"]["instruction_set"] in printed
    assert "ragged_dot: left out, ragged_dot is for MoE layers" in printed


def test_plot_is_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY.shape)
    monkeypatch.setattr(command, "Limits", FixedLimits)
    path = tmp_path / "roofline.png"
    words = "--shape tiny --group-size 32 --tokens 1 17 --repetitions 1 --layers 1 --plot"
    assert command.run(_arguments(*words.split(), str(path))) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("--shape nothing", ValueError, "shape must be one of .*qwen3-30b-a3b.*'nothing'"),
        ("--linear 12by4", ValueError, "linear must be NxK, .*'12by4'"),
        ("--peer nobody", ValueError, "peer must be one of .*'llama.cpp'.*'nobody'"),
        ("--instruction-set sse9", ValueError, "instruction set must be one of .*'sse9'"),
        ("--tokens 0", ValueError, "tokens must be at least 1, got 0"),
        ("--threads 0", ValueError, "threads must be at least 1, got 0"),
        ("--group-size 7", ValueError, "group_size must be .*got 7"),
        ("--layers 100000", MemoryError, "100000 layers of qwen3-30b-a3b need about .* GiB are free"),
    ],
)
def test_refusals_come_before_any_work(words, error, message, monkeypatch):
    monkeypatch.setattr(command, "Limits", None)
    monkeypatch.setattr(MoEWork, "layers", None)
    with pytest.raises(error, match=message):
        command.run(_arguments(*words.split()))


@pytest.mark.parametrize("name", PEERS)
def test_missing_peer_says_how_to_install_it(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=rf"peer {name} needs .*: pip install "):
        command.run(_arguments("--peer", name))


def test_missing_matplotlib_is_said_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=r"--plot needs matplotlib: pip install 'jax_w4a8\[bench\]'"):
        command.run(_arguments("--plot", str(tmp_path / "a.png")))
