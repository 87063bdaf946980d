"""Whole-model benchmarks, the INT4 output head, and the page that is made of recorded runs."""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_w4a8 import native_available
from jax_w4a8.bench import command, model, model_configs, shapes, trace
from jax_w4a8.bench.random_model import random_plan
from jax_w4a8.bench.random_weights import packed_bytes
from jax_w4a8.models import load_model
from jax_w4a8.models.layers import Linear, QuantizedOptions
from jax_w4a8.models.quantized_head import quantize_linear
from jax_w4a8.quantization import quantize
from jax_w4a8.weights import LinearWeights, pack_linear

from .checkpoints import DATA
from .test_bench import TINY, FixedLimits

pytestmark = pytest.mark.skipif(not native_available(), reason="needs the native extension")

ROOT = Path(__file__).parent.parent
PACKED = DATA / "qwen3_moe-g32-pack"
CONFIG = {
    **model_configs.CONFIGS["qwen3-30b-a3b"],
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


class ModelLimits(FixedLimits):
    bandwidths = {command.ffi.num_threads(): [1e8]}  # noqa: RUF012


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def tiny_record(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model_configs.CONFIGS, "tiny", CONFIG)
        patch.setattr(command, "Limits", ModelLimits)
        path = tmp_path_factory.mktemp("model") / "tiny.json"
        words = "--model tiny --layers 2 --group-size 32 --prompt-tokens 10 --decode-tokens 9 --head w4a8"
        assert _run(*words.split(), "--repetitions", "1", "--json", str(path)) == 0
        return json.loads(path.read_text())


def test_a_model_runs_and_every_part_is_seen(tiny_record):
    (ours,) = tiny_record["results"]
    assert tiny_record["model"]["layers"] == 2
    assert ours["prefill_rate"] == pytest.approx(10 / ours["prefill_seconds"])
    assert ours["decode_rate"] == pytest.approx(1e3 / ours["step_milliseconds"])
    step = tiny_record["step_milliseconds"]
    for part in ("experts", "attention projections", "attention", "router", "norms", "head", "sampling"):
        assert step[part] > 0, part
        assert tiny_record["prefill_milliseconds"][part] > 0, part
    assert sum(step.values()) > step["other"] * 5


def test_bytes_that_a_step_must_read_follow_from_sizes(tiny_record):
    found = tiny_record["must_read_bytes"]
    expert = packed_bytes(64, 64, 32) + packed_bytes(64, 32, 32)
    assert found["experts"] == 2 * 2 * expert  # two layers, two experts a token
    queries, keys, output = packed_bytes(64, 64, 32), packed_bytes(32, 64, 32), packed_bytes(64, 64, 32)
    norms = 2 * 16 * 2
    assert found["attention projections"] == 2 * (queries + 2 * keys + output + norms)
    assert found["head"] == packed_bytes(96, 64, 32)
    assert found["router"] == 2 * 8 * 64 * 2
    context = 10 + 9 // 2
    assert found["attention"] == 2 * 2 * context * 2 * 16 * 4
    assert found["other"] == found["sampling"] == 0


def test_plans_know_their_size():
    config, plan = random_plan("tiny", CONFIG, 32, True)
    from jax_w4a8.models.loading import build_decoder

    built = build_decoder(config, plan, QuantizedOptions(), lambda nbytes: None)
    assert plan.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(built))
    assert (
        plan.nbytes - random_plan("tiny", CONFIG, 32, False)[1].nbytes
        == packed_bytes(96, 64, 32) - 96 * 64 * 2
    )


def test_configs_and_shapes_agree():
    for name, config in model_configs.CONFIGS.items():
        shape = shapes.SHAPES[name]
        experts = next(
            config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config
        )
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        layers = config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
        sizes = (experts, config["num_experts_per_tok"], config["hidden_size"], inner, layers)
        assert sizes == dataclasses.astuple(shape), name


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("--model nothing", ValueError, "model must be one of .*'qwen3-30b-a3b'.*'nothing'"),
        ("--model qwen3-30b-a3b --layers 49", ValueError, r"layers must lie in \[1, 48\] .*got 49"),
        ("--model qwen3-30b-a3b --decode-tokens 0", ValueError, "decode_tokens must be at least 1"),
        ("--model qwen3-30b-a3b --baseline xla", ValueError, "for layers, not for --model"),
    ],
)
def test_refusals(words, error, message, monkeypatch):
    monkeypatch.setattr(model, "build_decoder", None)
    with pytest.raises(error, match=message):
        _run(*words.split())


def test_too_little_memory_is_said_with_figures_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(model, "build_decoder", None)
    monkeypatch.setattr(model, "available_bytes", lambda: 5 << 30)
    message = r"48 layers needs about \d+\.\d GiB \(\d+\.\d GiB of weights, .*5\.0 GiB are free: .*--layers"
    with pytest.raises(MemoryError, match=message):
        _run("--model", "qwen3-30b-a3b")


def test_all_of_qwen3_30b_a3b_fits_24_gib(monkeypatch):
    monkeypatch.setattr(model, "available_bytes", lambda: 23 << 30)
    case = model.ModelCase("qwen3-30b-a3b", None, 128, True, 512, 64)
    config, plan = model.check_memory(case)
    assert config.num_layers == 48
    assert 15e9 < plan.nbytes < 18.5e9


def test_operations_without_a_name_count_with_the_next_one():
    text = """
HloModule jit_step
%body (p: f32[1]) -> f32[1] {
  %p = f32[1] parameter(0)
  %ynn_fusion.1 = f32[1] fusion(%p), kind=kCustom
  ROOT %add.1 = f32[1] add(%ynn_fusion.1), metadata={op_name="jit(step)/attention/while/body/add"}
}
ENTRY %main (p: f32[1]) -> f32[1] {
  %convert.1 = f32[1] convert(%p)
  ROOT %call.2 = f32[1] custom-call(%convert.1), metadata={op_name="jit(step)/mlp/w4a8_fused_experts"}
}
"""
    parts = trace._parts(text)
    assert parts["ynn_fusion.1"] == parts["add.1"] == "attention"
    assert parts["convert.1"] == parts["call.2"] == "experts"


@pytest.mark.parametrize("rows", [40, 70])
def test_a_quantized_head_is_what_quantising_at_once_makes(rows, monkeypatch):
    monkeypatch.setattr("jax_w4a8.models.quantized_head._ROWS", 32)
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 64)), jnp.bfloat16)
    bias = jnp.arange(rows, dtype=jnp.float32)
    found = quantize_linear(Linear(weight, bias, QuantizedOptions()), QuantizedOptions())
    expected = pack_linear(quantize(weight.astype(jnp.float32), 32), bias)
    jax.tree.map(np.testing.assert_array_equal, found.weight.get_value(), expected)
    assert quantize_linear(found, QuantizedOptions()) is found


def test_models_load_with_a_quantized_head():
    plain, quantized = load_model(PACKED), load_model(PACKED, quantize_head=True)
    assert isinstance(quantized.head.weight.get_value(), LinearWeights)
    prompt = np.load(PACKED / "reference.npz")["prompt_ids"][None]
    expected, found = np.asarray(plain(prompt)), np.asarray(quantized(prompt))
    assert not np.array_equal(found, expected)
    # Random Gaussian weights in groups of 32 lose about a tenth of their norm to INT4.
    assert np.linalg.norm(found - expected) < 0.2 * np.linalg.norm(expected)


def test_llama_cpp_runs_a_whole_model(tmp_path):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from jax_w4a8.bench.peers.llamacpp import LlamaCpp
    from jax_w4a8.bench.peers.llamacpp_model import LlamaCppModel, file_bytes

    config = {**CONFIG, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    for kind in ("q4_0", "q4_K"):
        peer = LlamaCppModel(config, LlamaCpp(kind, False), 1, 64, tmp_path)
        assert peer.prefill(np.arange(5, dtype=np.int32)) > 0
        assert peer.step(3) > 0
        peer.close()
        size = (tmp_path / f"model-{kind}.gguf").stat().st_size
        assert file_bytes(config, kind) < size < file_bytes(config, kind) * 1.2 + 100_000


def test_page_is_written_from_records(tmp_path, monkeypatch, tiny_record):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import page
    import runs

    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY.shape)
    monkeypatch.setattr(command, "Limits", FixedLimits)
    words = "--shape tiny --group-size 32 --tokens 1 17 --repetitions 1 --layers 1 --baseline ragged_dot"
    assert _run(*words.split(), "--json", str(tmp_path / "layers.json")) == 0
    (tmp_path / "whole.json").write_text(json.dumps(tiny_record))
    some = {name: runs.Run("group", "", f"Question {name}") for name in ("layers", "whole", "absent")}
    monkeypatch.setattr(page, "RUNS", some)
    path = tmp_path / "README.md"
    path.write_text(f"Before\n\n{page.MARK}\n\nold table\n")
    page.write_page(path, tmp_path)
    text = path.read_text()
    assert text.startswith(f"Before\n\n{page.MARK}\n\n## Question layers")
    assert "old table" not in text
    assert "absent" not in text
    assert text.count("| ragged_dot float32 |") == 2
    assert "| experts |" in text


def test_targets_stand_beside_what_was_recorded(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import targets

    def row(implementation, variant, tokens, milliseconds, **more):
        shares = {"share_of_peak": 0.5, "share_of_bandwidth": 0.91, "share_of_bound": 0.91}
        case = {"tokens": tokens, "milliseconds": milliseconds, "routing": "uniform", "threads": 2}
        return {"implementation": implementation, "variant": variant, **case, **shares, **more}

    def ours(tokens, milliseconds, **more):
        return row("cpu_int4", "avx512_vnni", tokens, milliseconds, **more)

    llama = [row("llama.cpp", kind, 1024, time) for kind, time in (("Q4_0 repacked", 60), ("Q4_K", 30))]
    rates = ({"decode_rate": 30, "prefill_rate": 300}, {"decode_rate": 20, "prefill_rate": 150})
    records = {
        "qwen3-g128": {"results": [ours(1, 1), ours(1024, 10), ours(1024, 12, routing="one")]},
        "peer-llamacpp": {"results": [ours(1024, 10), row("cpu_int4", "amx_int8", 1024, 5), *llama]},
        "model-llamacpp": {"results": rates, "instruction_set": "amx_int8"},
    }
    header, rows = targets.target_table(records)
    assert header == ["case", "target", "avx512_vnni", "amx_int8"]
    assert rows == [
        ["of peak, g 128, T=1024", "85%", "50%", ""],
        ["of bandwidth, qwen3-g128, T=1", "90%", "91%", ""],
        ["all tokens on one expert over uniform, T=1024", "at most 1.10x", "1.20x", ""],
        ["against llama.cpp Q4_0 repacked, T=1024", "5.00x", "6.00x", "12.00x"],
        ["against llama.cpp Q4_K, T=1024", "2.30x", "3.00x", "6.00x"],
        ["whole model against llama.cpp, decode", "1.20x", "", "1.50x"],
        ["whole model against llama.cpp, prefill", "3.00x", "", "2.00x"],
    ]
    assert targets.target_table({}) == (["case", "target"], [])


def test_recorded_runs_are_commands_that_exist():
    import sys

    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import runs
    finally:
        sys.path.pop(0)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for name, run in runs.RUNS.items():
        arguments = parser.parse_args(run.arguments.split())
        assert set(arguments.shape or []) <= set(shapes.SHAPES), name
        assert set(arguments.peer) <= set(command.PEERS), name


def test_the_best_instruction_set_is_named_once():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    best = command.ffi.instruction_set()
    for words in ("", "--instruction-set best", f"--instruction-set {best} best"):
        assert command._instruction_sets(parser.parse_args(words.split())) == [best]
    assert command._instruction_sets(parser.parse_args(["--instruction-set", "portable", "best"])) == [
        "portable",
        best,
    ]
