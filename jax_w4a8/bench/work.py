"""The work that implementations are compared on: an MoE layer or a linear map, its inputs, what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jax_w4a8.bench.random_weights import packed_bytes, random_experts, random_linear
from jax_w4a8.bench.routings import random_ids
from jax_w4a8.bench.shapes import LayerShape, LinearShape
from jax_w4a8.quantization import normalize_group_size
from jax_w4a8.weights import ExpertWeights, LinearWeights

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Round:
    """Inputs of layers that run one after another, as those of a model do; numpy arrays.

    Layers are taken in turn: if there are fewer of them than steps, from the first one again.

    Attributes:
      x: float32 ``[T, K]``, of every step.
      weights: float32 ``[T, k]`` for each step; empty arrays for linear maps.
      ids: int32 ``[T, k]`` for each step; empty arrays for linear maps.
    """

    x: Array
    weights: tuple[Array, ...]
    ids: tuple[Array, ...]

    @property
    def steps(self) -> int:
        """How many layers run."""
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.x.shape[0])

    def passes(self, layers: int) -> list[Round]:
        """The same inputs, cut into rounds of ``layers`` steps."""
        return [
            round_of(self, range(first, min(first + layers, self.steps)))
            for first in range(0, self.steps, layers)
        ]


class Work(Protocol):
    """A kind of layer."""

    @property
    def name(self) -> str:
        """For tables."""

    @property
    def group_size(self) -> int:
        """Of the weights; -1 for channel-wise."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's packed weights."""

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates."""

    @property
    def model_layers(self) -> int:
        """Layers of this kind that a token meets in a model."""

    def layers(self, count: int) -> list[Any]:
        """Random layers that differ byte for byte, on the device."""

    def round(self, tokens: int, steps: int, layers: int, routing: str, rng: np.random.Generator) -> Round:
        """Random inputs of ``steps`` steps over ``layers`` layers."""

    def bytes_touched(self, inputs: Round) -> float:
        """Bytes that one step must read and write, on average: weights in use, x and y, each once."""


@dataclasses.dataclass(frozen=True)
class MoEWork:
    """One MoE layer from x to y, routing given."""

    name: str
    shape: LayerShape
    group_size: int

    def __post_init__(self) -> None:
        """Raises ValueError for a group size that the shape can't have."""
        normalize_group_size(self.group_size, self.shape.hidden_size)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's packed weights, scales, sums and biases."""
        shape = self.shape
        w13 = packed_bytes(2 * shape.intermediate_size, shape.hidden_size, self.group_size)
        w2 = packed_bytes(shape.hidden_size, shape.intermediate_size, self.group_size)
        return shape.num_experts * (w13 + w2)

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates."""
        return self.shape.macs_per_token

    @property
    def model_layers(self) -> int:
        """MoE layers of the model that the shape is from."""
        return self.shape.num_layers

    def layers(self, count: int) -> list[ExpertWeights]:
        """As :meth:`Work.layers`."""
        return [random_experts(self.shape, self.group_size, seed) for seed in range(count)]

    def round(self, tokens: int, steps: int, layers: int, routing: str, rng: np.random.Generator) -> Round:
        """As :meth:`Work.round`; a layer that comes again has new experts, as long as it has some."""
        shape = self.shape
        x = rng.standard_normal((tokens, shape.hidden_size), np.float32)
        last_used = np.full((layers, shape.num_experts), -1)
        ids = []
        for step in range(steps):
            drawn = random_ids(shape.num_experts, shape.top_k, tokens, routing, rng)
            ids.append(_least_recent(drawn, last_used[step % layers], step, rng))
        weights = tuple(rng.dirichlet(np.ones(shape.top_k), tokens).astype(np.float32) for _ in range(steps))
        return Round(x, weights, tuple(ids))

    def bytes_touched(self, inputs: Round) -> float:
        """As :meth:`Work.bytes_touched`."""
        experts = float(np.mean([len(np.unique(ids)) for ids in inputs.ids]))
        return experts * self.layer_bytes / self.shape.num_experts + 2 * inputs.x.nbytes


@dataclasses.dataclass(frozen=True)
class LinearWork:
    """One dense linear map."""

    name: str
    shape: LinearShape
    group_size: int

    def __post_init__(self) -> None:
        """Raises ValueError for a group size that the shape can't have."""
        normalize_group_size(self.group_size, self.shape.in_features)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the packed weights, scales, sums and biases."""
        return packed_bytes(self.shape.out_features, self.shape.in_features, self.group_size)

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates."""
        return self.shape.macs_per_token

    @property
    def model_layers(self) -> int:
        """One: its weights would not be cold when it comes again."""
        return 1

    def layers(self, count: int) -> list[LinearWeights]:
        """As :meth:`Work.layers`."""
        sizes = (self.shape.out_features, self.shape.in_features, self.group_size)
        return [random_linear(*sizes, seed) for seed in range(count)]

    def round(self, tokens: int, steps: int, layers: int, routing: str, rng: np.random.Generator) -> Round:
        """As :meth:`Work.round`; there is nothing to route."""
        x = rng.standard_normal((tokens, self.shape.in_features), np.float32)
        return Round(
            x, (np.empty((tokens, 0), np.float32),) * steps, (np.empty((tokens, 0), np.int32),) * steps
        )

    def bytes_touched(self, inputs: Round) -> float:
        """As :meth:`Work.bytes_touched`."""
        return self.layer_bytes + inputs.x.nbytes + 4 * inputs.tokens * self.shape.out_features


def cosine(a: Array, b: Array) -> float:
    """Cosine of the angle between two arrays taken as vectors."""
    first, second = (np.asarray(v, np.float64).ravel() for v in (a, b))
    norm = np.linalg.norm(first) * np.linalg.norm(second)
    return float(first @ second / norm) if norm else 0.0


def round_of(inputs: Round, steps: Sequence[int]) -> Round:
    """The same inputs, of some of the steps."""
    return Round(inputs.x, tuple(inputs.weights[i] for i in steps), tuple(inputs.ids[i] for i in steps))


def _least_recent(ids: Array, last_used: Array, step: int, rng: np.random.Generator) -> Array:
    """Other experts with the same loads: those whose weights were not read for longest."""
    used = np.unique(ids)
    coldest = np.lexsort((rng.permutation(len(last_used)), last_used))[: len(used)]
    names = np.empty(len(last_used), np.int32)
    names[used] = rng.permutation(coldest)
    last_used[coldest] = step
    return names[ids]
