"""Ctrl-C and the end of the interpreter, at any moment: the process stays usable, or ends as it should."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest

import jax_w4a8 as w4a8

from .reference import ROOT, assert_same_bits, in_process, random_batch, random_layer

pytestmark = [
    pytest.mark.skipif(not w4a8.native_available(), reason="there is no native backend here"),
    pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals"),
]


# ---------------------------------------------------------------------------------------------------------
# Interrupts. Run `interrupts(seed, turns)` with more turns for a longer trial.


def interrupted(operation: Callable[[], object], seconds: float) -> bool:
    """Runs ``operation`` and sends this process a SIGINT meanwhile; whether it met the operation.

    Where it comes too late, or Python drops it (as in a finaliser), it is waited for outside.
    """
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    ended = False
    try:
        timer.start()
        operation()
        ended = True
        timer.join()
        time.sleep(0.05)
    except KeyboardInterrupt:
        timer.join()
        return not ended
    return False


def interrupts(seed: int, turns: int) -> None:
    """Interrupts loading, packing, compiling, layers and texts at random moments; prints how many it met."""
    from jax_w4a8.models import default_model_path, load_model

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us behind it
    rng = random.Random(seed)
    layer, batch = random_layer(0, 8, 256, 512), random_batch(200, 256, 8)
    experts = layer.packed()
    call = jax.jit(w4a8.fused_experts)
    expected = np.asarray(call(*batch, experts))
    prompt = np.array([[5, 6, 7, 8]], np.int32)
    model = load_model(default_model_path())
    logits, ids = np.asarray(model(prompt)), model.generate(prompt, 40)

    def check_load() -> None:
        assert_same_bits(load_model(default_model_path())(prompt), logits)

    def check_pack() -> None:
        assert_same_bits(call(*batch, layer.packed()), expected)

    def compile_new(rows: int) -> jax.Array:
        fresh = jax.jit(functools.partial(w4a8.fused_experts, activation=w4a8.Activation()))
        return fresh(*(part[:rows] for part in batch), experts)

    def check_compile(rows: int) -> None:
        assert_same_bits(compile_new(rows), expected[:rows])

    def calls() -> None:
        for _ in range(30):
            call(*batch, experts).block_until_ready()

    def check_calls() -> None:
        assert_same_bits(call(*batch, experts), expected)

    def check_text() -> None:
        assert_same_bits(model.generate(prompt, 40), ids)

    met = dict.fromkeys(("load", "pack", "compile", "calls", "text"), 0)
    for turn in range(turns):
        rows = turn % 199 + 1
        phases = {
            "load": (lambda: load_model(default_model_path()), check_load),
            "pack": (lambda: [layer.packed() for _ in range(20)], check_pack),
            "compile": (lambda rows=rows: compile_new(rows), functools.partial(check_compile, rows)),
            "calls": (calls, check_calls),
            "text": (lambda: model.generate(prompt, 40), check_text),
        }
        for name, (operation, check) in phases.items():
            start = time.monotonic()
            check()
            met[name] += interrupted(operation, rng.uniform(0, time.monotonic() - start))
            check()
    print(met)


def some_interrupts() -> None:
    interrupts(seed=0, turns=2)


@pytest.mark.usefixtures("models")
def test_interrupts_leave_a_usable_process():
    met = in_process(some_interrupts, JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
    counts = [int(count) for count in re.findall(r": (\d+)", met)]
    assert len(counts) == 5
    assert sum(counts) >= 4  # of ten; each comes within what the operation took a moment before


@pytest.fixture
def models():
    pytest.importorskip("flax")
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")


def read_terminal(terminal: int, until: Callable[[str], bool], seconds: float = 120) -> str:
    """What a process writes to a pseudo-terminal, until it is enough or the process ends."""
    text = b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until(text.decode(errors="replace")):
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # Linux reports the end of the other side as an error
            break
        if not piece:
            break
        text += piece
    return text.decode(errors="replace")


PROMPT = "In the beginning"


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("moment", ["compiling", "decoding"])
def test_ctrl_c_ends_the_command_line(moment):
    pty, termios = pytest.importorskip("pty"), pytest.importorskip("termios")
    enough = 0 if moment == "compiling" else 30  # characters after the prompt, which comes before compiling
    terminal, other = pty.openpty()
    before = termios.tcgetattr(other)
    command = [sys.executable, "-m", "jax_w4a8", "generate", "--prompt", PROMPT, "--max-new-tokens", "900"]
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored ones are inherited
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, cwd=ROOT)
    signal.signal(signal.SIGINT, heard)
    try:
        text = read_terminal(
            terminal, lambda text: PROMPT in text and len(text.partition(PROMPT)[2]) >= enough
        )
        assert PROMPT in text
        process.send_signal(signal.SIGINT)
        text += read_terminal(terminal, lambda _: process.poll() is not None)
        assert process.wait(60) == 130, text
        assert termios.tcgetattr(other) == before
    finally:
        process.kill()
        process.wait()
        os.close(other)
        with contextlib.suppress(OSError):
            text += read_terminal(terminal, lambda _: False, seconds=2)
        os.close(terminal)
    assert "Traceback" not in text
    assert "tokens/s" not in text  # it had not come to its end
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # a hidden cursor is shown again


# ---------------------------------------------------------------------------------------------------------
# The interpreter ends while calls run. Run `ends(kind, count)` with a larger count for a longer trial.


def end_after_an_interrupted_text(seed: int) -> None:
    """The programs are there; see docs/long-runs.md on an interrupted compilation."""
    from jax_w4a8.models import default_model_path, load_model

    signal.signal(signal.SIGINT, signal.default_int_handler)
    model, prompt = load_model(default_model_path()), np.array([[5, 6, 7, 8]], np.int32)
    make = (lambda: list(model.stream(prompt, 100))) if seed % 2 else (lambda: model.generate(prompt, 100))
    make()
    seconds = random.Random(seed).uniform(0, 0.1)
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            make()


def end_while_calls_run(kind: str, seed: int) -> None:
    """What a forked child does; it returns into the end of the interpreter while kernels are running."""
    if kind == "text":
        end_after_an_interrupted_text(seed)
        return
    layer, batch = random_layer(0, 8, 256, 256).packed(), random_batch(512, 256, 8)
    call = jax.jit(w4a8.fused_experts)
    call(*batch, layer).block_until_ready()
    if kind == "pending":  # dispatched from here, and nobody waits for them
        pending = [call(*batch, layer) for _ in range(6)]
        time.sleep(random.Random(seed).uniform(0, 0.05))
        del pending
    else:  # ordinary threads are waited for

        def some() -> None:
            for _ in range(4):
                call(*batch, layer).block_until_ready()

        for _ in range(3):
            threading.Thread(target=some).start()


def ends(kind: str, count: int) -> None:
    """Forks children before JAX has started anything, and prints the exit codes that aren't 0."""
    for seed in range(count):
        child = os.fork()
        if child == 0:
            end_while_calls_run(kind, seed)
            return
        deadline = time.monotonic() + 60
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(found[1])
        if code != 0:
            print(f"{kind} {seed}: exit code {code}", flush=True)


def ends_with_pending_calls() -> None:
    ends("pending", 3)


def ends_with_threads_in_calls() -> None:
    ends("threads", 2)


def ends_after_interrupted_texts() -> None:
    ends("text", 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("models")
def test_the_interpreter_ends_after_an_interrupted_text():
    assert in_process(ends_after_interrupted_texts, JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore") == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("body", [ends_with_pending_calls, ends_with_threads_in_calls])
def test_the_interpreter_ends_while_calls_run(body):
    out = in_process(body, JAX_PLATFORMS="cpu", PYTHONWARNINGS="ignore")
    assert out == ""
