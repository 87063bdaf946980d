"""Requests of random sizes from several threads, for as long as one likes; nothing may change along the way.

    python benchmarks/soak.py --minutes 60 [--mode both] [--requests 48] [--threads 4] [--json FILE]

Threads take requests at random out of a fixed set: texts of the shipped model (1 to 4 prompts of random
lengths, greedy or sampled, and plain logits) and single layers on random weights (1 to 300 tokens). All the
while another thread changes the instruction set and the number of threads that kernels use, and frees their
working memory.

It fails unless
- every result has the bits that the same request had the first time;
- memory is flat: once every request has run and a fifth of the time is over, a straight line through samples
  taken each half second (least squares) rises by no more than GROWTH_BOUND over the rest of the run, and that
  of what malloc has given out by no more than ALLOCATED_BOUND. Between the two are holes in the arenas of
  threads, which grow until each arena has met the worst order of requests;
- the working memory that calls keep for the next ones stays below what its documentation says.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from resident import MIB, Residence
from verdict import circumstances, report

import jax_w4a8 as w4a8

#: What resident memory may grow by between the end of the warm-up and the end of the run.
GROWTH_BOUND = 32 * MIB
#: The same of what is allocated.
ALLOCATED_BOUND = 16 * MIB
MODES = ("model", "layer", "both")
#: Seconds that an instruction set and a number of threads stay.
CHANGE_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Request:
    """Something to ask for again and again.

    Attributes:
      name: what it is, for messages.
      tokens: how many it reads and makes.
      scratch: bytes of working memory that one call of it may keep.
      run: does it; returns the result.
    """

    name: str
    tokens: int
    scratch: int
    run: Callable[[], Any]


def scratch_bytes(tokens: int, top_k: int, hidden: int, inner: int) -> int:
    """By the rule that ``release_scratch`` documents, with a quarter and 4 MiB for what it calls "about"."""
    return min(tokens, 2048) * (hidden + top_k * (4 * hidden + 5 * inner)) * 5 // 4 + 4 * MIB


def model_requests(seed: int) -> Iterator[Request]:
    """Texts and logits of the shipped model."""
    from jax_w4a8.models import Sampling, default_model_path, load_model

    model = load_model(default_model_path())
    config = model.config
    rng = np.random.default_rng(seed)
    for number in itertools.count():
        lengths = rng.integers(1, 200, rng.integers(1, 5)).tolist()
        scratch = scratch_bytes(max(lengths) * len(lengths), 4, config.hidden_size, 1024)
        prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
        if number % 4 == 3:
            ids = np.array([prompts[0]] * len(prompts), np.int32)
            yield Request(f"logits of {ids.shape}", ids.size, scratch, functools.partial(model, ids))
            continue
        new = int(rng.integers(1, 48))
        sampling = Sampling(do_sample=number % 2 == 1, seed=number)

        run = functools.partial(model.generate, prompts, new, sampling=sampling)
        tokens = sum(lengths) + new * len(lengths)
        yield Request(f"{new} tokens after {lengths}, {sampling}", tokens, scratch, run)


def layer_requests(seed: int) -> Iterator[Request]:
    """Expert calls and linear maps on random weights."""
    rng = np.random.default_rng(seed)
    experts, top_k, hidden, inner = 8, 3, 320, 224
    fused = jax.jit(w4a8.fused_experts, static_argnames=("activation", "activation_scheme"))
    linear = jax.jit(w4a8.linear, static_argnames="activation_scheme")

    def matrices(group_size: int, *shape: int) -> w4a8.QuantizedTensor:
        return w4a8.quantize(rng.standard_normal(shape, np.float32) / 16, group_size)

    layers = [
        w4a8.pack_experts(
            matrices(group, experts, 2 * inner, hidden), matrices(group, experts, hidden, inner)
        )
        for group in (32, 96, -1)
    ]
    maps = [w4a8.pack_linear(matrices(group, 250, hidden)) for group in (64, -1)]
    while True:
        tokens = int(rng.integers(1, 300))
        dtype = rng.choice(["float32", "bfloat16", "float16"])
        scheme = str(rng.choice(["asymmetric", "symmetric"]))
        activation = str(rng.choice(["silu", "swigluoai", "gelu", "gelu_tanh"]))
        x = jnp.asarray(rng.standard_normal((tokens, hidden), np.float32), dtype)
        weights = jnp.asarray(rng.random((tokens, top_k), np.float32))
        ids = jnp.asarray(rng.integers(-1, experts, (tokens, top_k)), jnp.int32)
        layer, dense = layers[rng.integers(len(layers))], maps[rng.integers(len(maps))]

        run_experts = functools.partial(
            fused, x, weights, ids, layer, activation=activation, activation_scheme=scheme
        )
        run_linear = functools.partial(linear, x, dense, activation_scheme=scheme)
        scratch = scratch_bytes(tokens, top_k, hidden, inner)
        yield Request(f"{tokens} {dtype} tokens, {activation}, {scheme}", tokens, scratch, run_experts)
        yield Request(f"{tokens} {dtype} rows, {scheme}", tokens, scratch, run_linear)


class Soak:
    """The run: what threads share.

    Attributes:
      faults: what went wrong, in words; the first one ends the run.
      done, tokens, changes: counts of requests, of their tokens, and of changed settings.
      different: how many results differed from the first of their request.
      most_scratch: the largest amount of working memory found between calls, bytes.
    """

    def __init__(self, requests: list[Request], threads: int, seed: int) -> None:
        self.requests, self.threads, self.seed = requests, threads, seed
        self.faults: list[str] = []
        self.done = self.tokens = self.changes = self.different = self.most_scratch = 0
        self._results: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def warm(self) -> bool:
        """Whether every request has run."""
        return len(self._results) == len(self.requests)

    @property
    def scratch_bound(self) -> int:
        """What may be kept: a block for each call that ran at the same time, and 1 GiB in all."""
        return min(self.threads * max(request.scratch for request in self.requests), 1 << 30)

    def run(self, seconds: float) -> tuple[Residence, float]:
        """Returns samples of memory, and from what time on they count."""
        workers = [threading.Thread(target=self._guard, args=(self._work, n)) for n in range(self.threads)]
        workers.append(threading.Thread(target=self._guard, args=(self._change_settings, self.threads)))
        residence, start = Residence(), time.monotonic()
        warm_since = None
        for worker in workers:
            worker.start()
        while time.monotonic() < start + seconds and not self._stop.wait(0.5):
            residence.sample(self.done)
            if warm_since is None and self.warm and time.monotonic() > start + seconds / 5:
                warm_since = time.monotonic()
                print(f"warm after {warm_since - start:.0f} s", flush=True)
        self._stop.set()
        for worker in workers:
            worker.join()
        if warm_since is None:
            self.faults.append(f"{seconds:.0f} s are too short: {len(self._results)} requests ran")
            warm_since = start
        return residence, warm_since

    def _guard(self, body: Callable[[random.Random], None], number: int) -> None:
        """Runs a thread's body until the end; whatever it raises is a fault."""
        rng = random.Random(f"{self.seed} {number}")
        try:
            while not self._stop.is_set():
                body(rng)
        except BaseException as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            self._stop.set()

    def _work(self, rng: random.Random) -> None:
        missing = [n for n in range(len(self.requests)) if n not in self._results]
        number = rng.choice(missing or range(len(self.requests)))
        request = self.requests[number]
        found = np.ascontiguousarray(np.asarray(request.run()))
        digest = hashlib.blake2b(found.view(np.uint8).tobytes(), digest_size=16).digest()
        with self._lock:
            self.done += 1
            self.tokens += request.tokens
            if self._results.setdefault(number, digest) != digest:
                self.different += 1
                raise AssertionError(f"result {self.done}, of {request.name}, differs from its first")

    def _change_settings(self, rng: random.Random) -> None:
        name, limit = rng.choice(w4a8.instruction_sets()), rng.choice([1, 2, 3, 64])
        with w4a8.using_instruction_set(name), w4a8.thread_limit(limit):
            self.changes += 1
            self._stop.wait(CHANGE_SECONDS)
        kept = w4a8.release_scratch()
        self.most_scratch = max(self.most_scratch, kept)
        if kept > self.scratch_bound:
            raise AssertionError(f"{kept} bytes of working memory, more than {self.scratch_bound}")


def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs and judges; returns what happened."""
    makers = {"model": model_requests, "layer": layer_requests}
    chosen = list(makers) if arguments.mode == "both" else [arguments.mode]
    streams = [makers[name](arguments.seed) for name in chosen]
    requests = [next(streams[n % len(streams)]) for n in range(arguments.requests)]
    compiles: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: (
            compiles.append(seconds) if name.endswith("backend_compile_duration") else None
        )
    )
    run = Soak(requests, arguments.threads, arguments.seed)
    residence, warm_since = run.run(60 * arguments.minutes)
    for kind, bound in (("resident", GROWTH_BOUND), ("allocated", ALLOCATED_BOUND)):
        grown = residence.growth(warm_since, kind)
        if grown > bound:
            run.faults.append(f"{kind} memory grew by {grown / MIB:.1f} MiB")
    return {
        "seconds": round(60 * arguments.minutes),
        "threads": arguments.threads,
        "different_requests": len(requests),
        "requests": run.done,
        "tokens": run.tokens,
        "compiles": len(compiles),
        "changes_of_settings": run.changes,
        "different_results": run.different,
        "resident": residence.summary(warm_since),
        "growth_bound_mib": GROWTH_BOUND // MIB,
        "allocated_bound_mib": ALLOCATED_BOUND // MIB,
        "most_scratch_mib": round(run.most_scratch / MIB, 2),
        "scratch_bound_mib": round(run.scratch_bound / MIB, 2),
        "faults": run.faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--requests", type=int, default=48, help="how many different ones")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write what happened here too")
    arguments = parser.parse_args()
    head = circumstances()
    return report(head, soak(arguments), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
