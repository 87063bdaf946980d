"""A whole model with random weights: prefill and decode, part by part, against what must be read."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_w4a8 import ffi
from jax_w4a8.bench.machine import Limits
from jax_w4a8.bench.measure import REST_SECONDS
from jax_w4a8.bench.memory import available_bytes
from jax_w4a8.bench.model_configs import find_config
from jax_w4a8.bench.random_model import random_plan
from jax_w4a8.bench.trace import PARTS, Breakdown, breakdown
from jax_w4a8.bench.work import Array
from jax_w4a8.models.attend import cache_slots
from jax_w4a8.models.cache import KVCache
from jax_w4a8.models.config import DecoderConfig, MixtureConfig
from jax_w4a8.models.decoder import Decoder
from jax_w4a8.models.layers import Linear, QuantizedOptions
from jax_w4a8.models.loading import build_decoder
from jax_w4a8.models.mlp import MoE
from jax_w4a8.models.plan import DecoderPlan
from jax_w4a8.models.sampling import likeliest

#: Beside weights and cache: JAX, compiled programs, scratch, the buffer that bandwidth is read from.
_OVERHEAD_BYTES = 3 << 30
_TRACED_STEPS = 8
#: Tokens after which the bandwidth is measured again.
_STEPS_BETWEEN_LIMITS = 8

Made = tuple[jax.Array, KVCache]


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """What a run is about.

    Attributes:
      name: a model of :mod:`jax_w4a8.bench.model_configs`.
      layers: how many of its layers; None for all.
      group_size: of quantised weights.
      quantized_head: W4A8 instead of bfloat16.
      prompt_tokens, decode_tokens: how many.
    """

    name: str
    layers: int | None
    group_size: int
    quantized_head: bool
    prompt_tokens: int
    decode_tokens: int


def check_memory(case: ModelCase, beside: float = 0) -> tuple[DecoderConfig, DecoderPlan]:
    """The plan of a case that fits; nothing large has been allocated.

    Args:
      case: what is to run.
      beside: bytes that a peer takes at the same time.

    Raises:
      ValueError: an unknown model, or it hasn't so many layers.
      MemoryError: it doesn't fit; the message has the figures.
    """
    fields = find_config(case.name, case.layers)
    config, plan = random_plan(case.name, fields, case.group_size, case.quantized_head)
    cache = 8 * config.num_layers * config.hidden_size * slots_of(case)  # at most
    needed, available = plan.nbytes + cache + _OVERHEAD_BYTES + beside, available_bytes()
    if needed > available:
        peer = f", {beside / 2**30:.1f} GiB for peers" if beside else ""
        raise MemoryError(
            f"{case.name} with {config.num_layers} layers needs about {needed / 2**30:.1f} GiB "
            f"({plan.nbytes / 2**30:.1f} GiB of weights, {cache / 2**30:.1f} GiB of KV cache{peer}), and "
            f"{available / 2**30:.1f} GiB are free: take fewer layers with --layers"
        )
    return config, plan


class _Programs:
    """A model's two programs, compiled ahead."""

    def __init__(self, model: Decoder, prompt_tokens: int, slots: int) -> None:
        graphdef, state = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(state)

        def merged(leaves: list[jax.Array]) -> Decoder:
            whole: Decoder = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            return whole

        def prefill(leaves: list[jax.Array], token_ids: jax.Array) -> Made:
            model = merged(leaves)
            hidden, cache = model.hidden_states(token_ids, model.empty_cache(1, slots))
            return _likeliest(model, hidden[:, -1]), cache

        def step(leaves: list[jax.Array], token: jax.Array, cache: KVCache) -> Made:
            model = merged(leaves)
            hidden, cache = model.hidden_states(token[:, None], cache)
            return _likeliest(model, hidden[:, 0]), cache

        prompt = jax.ShapeDtypeStruct((1, prompt_tokens), jnp.int32)
        lowered = jax.jit(prefill).lower(self._leaves, prompt)
        self.compiled_prefill: Any = lowered.compile()
        token, cache = lowered.out_info
        self.compiled_step: Any = jax.jit(step, donate_argnums=2).lower(self._leaves, token, cache).compile()

    def prefill(self, prompt: jax.Array) -> Made:
        made: Made = jax.block_until_ready(self.compiled_prefill(self._leaves, prompt))
        return made

    def step(self, made: Made) -> Made:
        following: Made = jax.block_until_ready(self.compiled_step(self._leaves, *made))
        return following


def _likeliest(model: Decoder, hidden: jax.Array) -> jax.Array:
    logits = model.logits(hidden)
    with jax.named_scope("sampling"):
        return likeliest(logits)


class ModelRun:
    """Our model, built and compiled."""

    name = "jax_w4a8"

    def __init__(
        self, case: ModelCase, config: DecoderConfig, plan: DecoderPlan, say: Callable[[str], None]
    ) -> None:
        self.case = case
        self.config = config
        started = time.perf_counter()
        model = build_decoder(config, plan, QuantizedOptions(), lambda nbytes: None)
        self.build_seconds = time.perf_counter() - started
        say(f"  {plan.nbytes / 1e9:.2f} GB of weights made in {self.build_seconds:.0f} s")
        self.weight_bytes = plan.nbytes
        self.must_read = _must_read(model, config, case.prompt_tokens + case.decode_tokens // 2)
        self._made: Made | None = None
        started = time.perf_counter()
        self._programs = _Programs(model, case.prompt_tokens, slots_of(case))
        self.compile_seconds = time.perf_counter() - started
        say(f"  both programs compiled in {self.compile_seconds:.0f} s")

    def prefill(self, tokens: Array) -> float:
        """As :meth:`Timed.prefill`."""
        self._made = None  # its memory is needed
        prompt = jnp.asarray(tokens[None])
        started = time.perf_counter()
        self._made = self._programs.prefill(prompt)
        return time.perf_counter() - started

    def step(self, token: int) -> float:
        """As :meth:`Timed.step`; the token is the likeliest one, whatever is given."""
        if self._made is None:
            raise RuntimeError("prefill comes before the first step")
        started = time.perf_counter()
        self._made = self._programs.step(self._made)
        return time.perf_counter() - started

    def prefill_breakdown(self) -> Breakdown:
        """One prompt, part by part."""
        prompt = np.zeros(self.case.prompt_tokens, np.int32)
        return breakdown(self._programs.compiled_prefill, lambda: _ignore(self.prefill(prompt)), 1)

    def step_breakdown(self) -> Breakdown:
        """Some steps after those measured, part by part."""
        return breakdown(self._programs.compiled_step, lambda: _ignore(self.step(0)), _TRACED_STEPS)


def _ignore(value: object) -> None:
    pass


def slots_of(case: ModelCase) -> int:
    """Positions that a run needs, rounded up to whole blocks."""
    return cache_slots(case.prompt_tokens + case.decode_tokens + _TRACED_STEPS)


def _must_read(model: Decoder, config: DecoderConfig, context: int) -> dict[str, float]:
    """Bytes that one decode step must read, by part: each weight in use once, and keys and values."""
    found = dict.fromkeys(PARTS, 0.0)
    for layer, kind in zip(model.layers, config.mlps, strict=True):
        found["attention projections"] += _nbytes(layer.attention)
        if isinstance(layer.mlp, MoE) and isinstance(kind, MixtureConfig):
            share = kind.routing.top_k / kind.num_experts
            found["experts"] += _nbytes(layer.mlp.experts) * share
            found["router"] += _nbytes(layer.mlp.router)
        else:
            found["dense MLP"] += _nbytes(layer.mlp)
        found["norms"] += _nbytes(layer.attention_norm) + _nbytes(layer.mlp_norm)
    slots = cache_slots(context)
    cache = jax.eval_shape(lambda: model.empty_cache(1, slots))
    found["attention"] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers))
    found["attention"] *= context / slots
    head: Linear | Any = model.embedding if model.head is None else model.head
    found["head"] = _nbytes(head)
    return found


def _nbytes(module: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(module))


class Timed(Protocol):
    """A model that can be timed: ours or a peer's."""

    name: str

    def prefill(self, tokens: Array) -> float:
        """Seconds of one prompt, int32 ``[T]``, from an empty cache."""

    def step(self, token: int) -> float:
        """Seconds of one more token."""


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """Medians of a whole-model run.

    Attributes:
      implementation: ours or a peer.
      prefill_seconds, prefill_rate: the prompt, and its tokens per second.
      step_milliseconds, decode_rate: one token, and tokens per second.
      step_bandwidth_share: bytes that our step must read over the time taken, as a share of plain reads.
      bandwidth_gbytes: plain reads, in turn with the steps.
    """

    implementation: str
    prefill_seconds: float
    prefill_rate: float
    step_milliseconds: float
    decode_rate: float
    step_bandwidth_share: float
    bandwidth_gbytes: float


def measure(
    models: Sequence[Timed], case: ModelCase, must_read: float, limits: Limits, repetitions: int
) -> list[ModelResult]:
    """Prefill and decode of every model, taking turns with each other and with the bandwidth.

    A first prefill, of which memory is new and files are read, isn't counted.
    """
    threads = ffi.num_threads()
    tokens = np.random.default_rng(0).integers(0, 1000, case.prompt_tokens).astype(np.int32)
    for one in models:
        one.prefill(tokens)

    def prefill(one: Timed) -> float:
        time.sleep(REST_SECONDS)
        return one.prefill(tokens)

    prefills = [
        statistics.median(column)
        for column in zip(*([prefill(one) for one in models] for _ in range(repetitions)), strict=True)
    ]
    steps: list[list[float]] = [[] for _ in models]
    shares: list[list[float]] = [[] for _ in models]
    bandwidths = []
    for first in range(0, case.decode_tokens, _STEPS_BETWEEN_LIMITS):
        count = min(_STEPS_BETWEEN_LIMITS, case.decode_tokens - first)
        for one, own_steps, own_shares in zip(models, steps, shares, strict=True):
            time.sleep(REST_SECONDS)
            bandwidths.append(limits.bandwidth(threads))
            taken = [one.step(token) for token in range(first, first + count)]
            own_steps += taken
            own_shares += [must_read / seconds / bandwidths[-1] for seconds in taken]
    return [
        ModelResult(
            one.name,
            prefill,
            case.prompt_tokens / prefill,
            1e3 * statistics.median(own_steps),
            1 / statistics.median(own_steps),
            statistics.median(own_shares),
            statistics.median(bandwidths) / 1e9,
        )
        for one, prefill, own_steps, own_shares in zip(models, prefills, steps, shares, strict=True)
    ]


def print_breakdown(
    title: str, found: Breakdown, wall_milliseconds: float, must_read: dict[str, float] | None
) -> None:
    """A table of parts; the last line is what the wall clock saw outside of all operations."""
    print(f"  {title}: {wall_milliseconds:.2f} ms, {found.operations} operations")
    print(f"    {'part':<24} {'ms':>9} {'share':>6}" + (f" {'MB':>8} {'GB/s':>6}" if must_read else ""))
    for part, milliseconds in found.milliseconds.items():
        if not milliseconds and not (must_read and must_read[part]):
            continue
        line = f"    {part:<24} {milliseconds:>9.3f} {milliseconds / wall_milliseconds:>6.1%}"
        if must_read:
            nbytes = must_read[part]
            rate = nbytes / milliseconds / 1e6 if milliseconds else 0
            line += f" {nbytes / 1e6:>8.1f} {rate:>6.1f}"
        print(line)
    between = wall_milliseconds - found.total
    print(f"    {'between operations':<24} {between:>9.3f} {between / wall_milliseconds:>6.1%}", flush=True)
