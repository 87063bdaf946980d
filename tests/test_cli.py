"""The command line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from jax_w4a8 import ffi
from jax_w4a8.cli import COMMANDS, main

from .checkpoints import DATA, edited

PROMPT = "And it came to pass in those days, that"
REFERENCE = DATA / "kjv-qwen3-moe-g32-pack" / "reference.npz"


@pytest.fixture(scope="module")
def symmetric():
    """The 32 tokens of the reference, as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(["generate", "--activation-scheme", "symmetric", "--max-new-tokens", "32", "--json"])
    assert code == 0
    return json.loads(output.getvalue())


def test_json_holds_the_reference_text(symmetric):
    assert symmetric["prompt"] == PROMPT
    assert symmetric["ids"] == np.load(REFERENCE)["greedy_ids"].tolist()
    assert symmetric["text"].startswith(" the king of Israel came to the king")
    native = ffi.native_available()
    assert symmetric["backend"] == ("CPU_INT4" if native else "XLA")
    assert symmetric["instruction_set"] == (ffi.instruction_set() if native else None)
    assert symmetric["threads"] == ffi.num_threads()
    assert symmetric["activation_scheme"] == "symmetric"
    assert symmetric["prefill_tokens"] == 10
    assert symmetric["decode_tokens"] == 31
    for rate in ("prefill_tokens_per_second", "decode_tokens_per_second", "compile_seconds"):
        assert symmetric[rate] > 0


def test_text_is_followed_by_a_summary(symmetric, capsys):
    code = main(["generate", "--activation-scheme", "symmetric", "--max-new-tokens", "32"])
    assert code == 0
    text, _, summary = capsys.readouterr().out.rstrip("\n").rpartition("\n\n")
    assert text == PROMPT + symmetric["text"]
    assert re.fullmatch(
        r"backend (CPU_INT4|XLA), instruction set [^,]+, \d+ threads, prefill [\d.]+ tokens/s, "
        r"decode [\d.]+ tokens/s \(compiled before in [\d.]+ s\)",
        summary,
    )


def test_a_prompt_of_many_bytes_per_character(capsys):
    options = ["--activation-scheme", "symmetric", "--max-new-tokens", "3", "--json"]
    assert main(["generate", "--prompt", "Über 日本", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt"] == "Über 日本"
    assert len(report["ids"]) == 3


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "jax_w4a8", "generate", "--max-new-tokens", "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(10) == PROMPT[:10]
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_info_describes_machine_and_checkpoint(capsys):
    assert main(["info"]) == 0
    machine = capsys.readouterr().out
    assert "CPU_INT4: " in machine
    assert "XLA: yes" in machine
    for name in ffi.instruction_sets():
        assert name in machine
    assert main(["info", str(DATA / "qwen3_moe-channel-int")]) == 0
    lines = capsys.readouterr().out.splitlines()
    backend = "CPU_INT4" if ffi.native_available() else "XLA"
    experts = next(line for line in lines if line.startswith("model.layers.2.mlp.experts "))
    assert re.search(r"8 experts of 3 x \[64, 128\] +int4 channel-wise, bfloat16 scales", experts)
    assert experts.endswith(backend)
    head = next(line for line in lines if line.startswith("lm_head"))
    assert re.search(r"\[512, 128\] +bf16 +0\.12 +-$", head)


def damaged(tmp_path):
    path = edited(tmp_path / "damaged", tensors=lambda t: t.pop("model.norm.weight"))
    return ["generate", "--model", str(path)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda _: ["generate", "--model", "/nowhere"], "/nowhere is not a directory"),
        (lambda _: ["info", "/nowhere"], "/nowhere is not a directory"),
        (lambda path: ["generate", "--model", str(path)], "tokenizer.json is missing"),
        (lambda _: ["generate", "--prompt", ""], "prompt must not be empty"),
        (lambda _: ["generate", "--max-new-tokens", "-1"], "max_new_tokens must be at least 0, got -1"),
        (lambda _: ["generate", "--max-new-tokens", "2000"], "max_new_tokens must be at most 1014"),
        (lambda _: ["info", str(DATA / "kjv-qwen3-moe-g32-pack")], "config.json is missing"),
        (damaged, "tokenizer.json is missing"),
        (lambda path: ["info", damaged(path)[-1]], "'model.norm.weight' is missing"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    assert main(arguments(tmp_path)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments", [[], ["sing"], ["generate", "--backend", "tpu"], ["generate", "--max-new-tokens", "x"]]
)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as leave:
        main(arguments)
    assert leave.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_damaged_tokenizer_is_named(tmp_path, capsys):
    path = edited(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    assert main(["generate", "--model", str(path)]) == 2
    assert "tokenizer.json can't be read as a tokenizer" in capsys.readouterr().err


def test_every_command_is_in_the_help(capsys):
    with pytest.raises(SystemExit) as leave:
        main(["--help"])
    assert leave.value.code == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in text
        assert command.summary in text
