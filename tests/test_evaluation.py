"""Perplexity by sliding window, against numpy and against the same weights in floating point."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import math

import numpy as np
import pytest

from jax_w4a8.cli import main
from jax_w4a8.models import load_model, perplexity
from jax_w4a8.models.evaluation import windows

from .checkpoints import DATA, SHARED, relative
from .qwen3_reference import Reference

TINY = DATA / "qwen3_moe-g32-pack"
TEXT = DATA / "kjv.txt"


@functools.cache
def tiny():
    return load_model(TINY, "symmetric")


def token_ids(count=61):
    return np.random.default_rng(0).integers(0, 512, count)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def by_hand(forward, ids, max_length, stride):
    """Hugging Face's loop: labels before the last reached token are left out, and the first has no logits."""
    total, count, reached = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        logits = forward(ids[begin:end])
        for position in range(max(reached, begin + 1), end):
            total -= log_softmax(logits[position - 1 - begin])[ids[position]]
            count += 1
        reached = end
        if end == len(ids):
            break
    return total, count


@pytest.mark.parametrize(("max_length", "stride"), [(24, 8), (24, 24), (64, 32), (16, 1)])
def test_it_is_what_numpy_computes(max_length, stride):
    ids = token_ids()
    expected, count = by_hand(lambda part: np.asarray(tiny()(part[None]))[0], ids, max_length, stride)
    made = perplexity(tiny(), ids, max_length=max_length, stride=stride, text_bytes=100)
    assert made.tokens == count
    assert made.nll == pytest.approx(expected, rel=1e-5)
    assert made.perplexity == pytest.approx(math.exp(expected / count), rel=1e-5)
    assert made.bits_per_byte == pytest.approx(expected / math.log(2) / 100, rel=1e-5)
    assert (made.max_length, made.stride) == (max_length, stride)


def test_batches_of_windows_change_no_bit():
    ids = token_ids(200)
    one, four = (perplexity(tiny(), ids, max_length=64, stride=20, batch_size=size) for size in (1, 4))
    assert one.tokens == 199
    assert one.nll == pytest.approx(four.nll, rel=1e-12)


def test_each_token_is_scored_once():
    for tokens, length, stride in ((2, 2, 1), (100, 10, 3), (99, 32, 32), (7, 100, 50), (64, 32, 16)):
        parts = list(windows(tokens, length, stride))
        scored = np.concatenate([np.arange(part.first, part.end) for part in parts])
        assert len(np.unique(scored)) == len(scored)
        unscored = sorted(set(range(tokens)) - set(scored.tolist()))
        assert unscored == ([0] if stride < length else list(range(0, tokens, stride)))
        assert all(part.end - part.begin <= length for part in parts)


def test_float_activations_are_those_of_the_reference_in_numpy():
    wide = tiny().with_float_activations()
    ids = np.load(TINY / "reference.npz")["prompt_ids"]
    reference = np.load(TINY / "reference.npz")["logits_weight_only"]
    assert relative(np.asarray(wide(ids[None]))[0], reference) < 1e-5
    assert not tiny().options.float_activations
    forward = Reference(TINY, None)
    expected, count = by_hand(forward, token_ids(40), 24, 12)
    made = perplexity(wide, token_ids(40), max_length=24, stride=12)
    assert (made.nll, made.tokens) == (pytest.approx(expected, rel=1e-5), count)


def test_progress_ends_with_all_tokens():
    seen = []
    perplexity(tiny(), token_ids(), max_length=24, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (60, 60)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([1], {}, "token_ids must hold at least 2 tokens"),
        ([], {}, "token_ids must hold at least one token"),
        ([1, 512], {}, r"token_ids must lie in \[0, 512\), found 512"),
        ([1, 2], {"max_length": 257}, r"max_length must be in \[2, 256\].* got 257"),
        ([1, 2], {"max_length": 1}, "max_length"),
        ([1, 2], {"max_length": 16, "stride": 17}, r"stride must be in \[1, max_length = 16\], got 17"),
        ([1, 2], {"stride": 0}, "stride"),
        ([1, 2], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(ids, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(tiny(), np.array(ids, np.int32), **options)


def evaluate(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["eval", "--text", str(TEXT), *arguments]) == 0
    return output.getvalue()


def test_the_command_tells_what_int8_activations_cost():
    options = ["--max-length", "256", "--stride", "128", "--batch-size", "4", "--weights-only"]
    report = json.loads(evaluate(*options, "--json"))
    assert report["text_bytes"] == len(TEXT.read_bytes())
    assert report["tokens"] > 700
    w4a8, w4a16 = report["w4a8"]["perplexity"], report["w4a16"]["perplexity"]
    assert 10 < w4a16 < 40
    assert abs(w4a8 / w4a16 - 1) < 0.02
    assert report["w4a8"]["bits_per_byte"] < 2
    lines = evaluate(*options[:-1], "--max-tokens", "100").splitlines()
    assert lines[0] == "99 tokens, windows of 256, stride 128, asymmetric activations"
    assert lines[1].startswith("W4A8 ")


def test_the_command_compares_with_the_float_original():
    original = SHARED / "kjv-qwen3-moe-float"
    if not original.is_dir():
        pytest.skip(f"{original} is not here")
    if "allow_float" not in inspect.signature(load_model).parameters:
        pytest.skip("checkpoints in floating point can't be loaded")
    report = json.loads(evaluate("--max-length", "128", "--float", str(original), "--json"))
    exact = report["float"]["perplexity"]
    assert 10 < exact < 40
    assert 1 < report["w4a8"]["perplexity"] / exact < 1.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "/nowhere.txt"], "/nowhere.txt"),
        (["--text", str(TEXT), "--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
        (["--text", str(TEXT), "--stride", "0"], "stride must be in [1, max_length = 1024], got 0"),
        (["--text", str(TEXT), "--model", str(TINY)], "tokenizer.json is missing"),
        (["--text", str(TINY / "model.safetensors")], "is no UTF-8 text"),
    ],
)
def test_bad_input_of_the_command_is_one_line(arguments, message, capsys):
    assert main(["eval", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
