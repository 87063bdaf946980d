"""Several processes on this machine: the text of one, and an end when one is lost."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_w4a8 import distributed

pytest.importorskip("jax_w4a8.models")

GENERATE = [sys.executable, "-m", "jax_w4a8", "generate"]
#: Seconds that processes get to notice a lost one: a collective fails at once, a heartbeat after 20.
NOTICE = 90


def _start(*arguments, **kwargs):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [*GENERATE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **kwargs,
    )


@pytest.fixture(scope="module")
def alone():
    process = _start("--max-new-tokens", "12", "--json")
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return json.loads(output)


@pytest.mark.parametrize("processes", [2, 4])
def test_text_equals_that_of_one_process(alone, processes):
    process = _start("--distributed", "--num-processes", str(processes), "--max-new-tokens", "12", "--json")
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    report = json.loads(output)  # and nothing else: no other process, no library writes there
    assert report["shards"] == processes
    assert report["ids"] == alone["ids"]
    assert report["text"] == alone["text"]


def _wait_for_text(process):
    """Until the first new token is there: all processes are past the start and in step."""
    prompt = "And it came to pass in those days, that"
    text = process.stdout.read(len(prompt) + 4)
    assert text.startswith(prompt), process.stderr.read()


def _children(process):
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes by /proc")
def test_launcher_ends_all_when_one_is_lost():
    process = _start("--distributed", "--max-new-tokens", "900")
    try:
        _wait_for_text(process)
        first, second = _children(process)
        os.kill(second, signal.SIGKILL)
        _, errors = process.communicate(timeout=NOTICE)
    finally:
        process.kill()
    assert process.returncode == 2
    assert errors.startswith("error: process ")
    assert errors.count("\n") == 1
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_others_end_without_a_launcher_too():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    group = ["--distributed", "--coordinator", coordinator, "--num-processes", "2", "--max-new-tokens", "900"]
    first, second = (_start(*group, "--process-id", str(i)) for i in (0, 1))
    try:
        _wait_for_text(first)
        second.kill()
        start = time.monotonic()
        _, errors = first.communicate(timeout=NOTICE)
        assert time.monotonic() - start < NOTICE
    finally:
        first.kill()
        second.kill()
        second.communicate()
    assert first.returncode not in (0, None)
    assert "error" in errors.lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-processes", "2"], "need --distributed"),
        (["--distributed", "--num-processes", "0"], "num_processes must be at least 1, got 0"),
        (["--distributed", "--process-id", "0"], "must be given together"),
        (["--distributed", "--coordinator", "a:1", "--process-id", "0"], "must be given together"),
        (
            ["--distributed", "--coordinator", "a", "--process-id", "0", "--num-processes", "2"],
            "coordinator must be HOST:PORT, got 'a'",
        ),
        (
            ["--distributed", "--coordinator", "a:1", "--process-id", "2", "--num-processes", "2"],
            r"process_id must lie in \[0, 2\), the number of processes, got 2",
        ),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    from jax_w4a8.cli import main

    assert main(["generate", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_process_that_fails_speaks_for_all(capfd):
    script = "import sys; print('error: no such thing', file=sys.stderr); sys.exit(2)"
    with pytest.raises(RuntimeError, match=r"process \d of 2 ended with exit code 2: no such thing"):
        distributed.launch([sys.executable, "-c", script], 2)
    start = time.monotonic()
    hang = "import sys, time; time.sleep(0 if sys.argv[-1] == '1' else 600); sys.exit(int(sys.argv[-1]))"
    with pytest.raises(RuntimeError, match="process 1 of 3 ended with exit code 1"):
        distributed.launch([sys.executable, "-c", hang], 3)
    assert time.monotonic() - start < 60
    assert capfd.readouterr().err == ""
