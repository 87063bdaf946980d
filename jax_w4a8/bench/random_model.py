"""Whole models with random weights, made layer by layer straight in packed form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from jax_w4a8.bench.random_weights import packed_bytes, random_experts, random_linear
from jax_w4a8.bench.shapes import LayerShape
from jax_w4a8.buffers import aligned_empty
from jax_w4a8.checkpoint import StoredArray, StoredExperts, StoredLinear
from jax_w4a8.checkpoint.scheme import Scheme
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.families import find_family
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.plan import DecoderPlan, MoEPlan, plan_decoder
from jax_w4a8.weights import ExpertWeights, LinearWeights

Array = np.ndarray[Any, Any]

#: What checkpoints leave in floating point, besides the head.
_FLOAT_MODULES = re.compile(r".*\.(gate|router|shared_expert_gate)$")
_HEAD = "lm_head"
#: Rows of random numbers that tables repeat.
_BASE_ROWS = 1024
_NO_FILES: Any = None


@dataclasses.dataclass(frozen=True)
class RandomArray(StoredArray):
    """A floating point tensor: ones for a norm, else random."""

    sizes: tuple[int, ...] = ()
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.sizes

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(np.prod(self.sizes)) * 2

    @property
    def dtype_name(self) -> str:
        """safetensors' name of the dtype."""
        return "BF16"

    def read(self) -> Array:
        """bfloat16 values of about unit gain."""
        values = aligned_empty(self.sizes, ml_dtypes.bfloat16)
        if len(self.sizes) == 1:
            values[...] = 0 if self.name.endswith("bias") else 1
            return values
        rng = np.random.default_rng(self.seed)
        rows, columns = self.sizes
        base = rng.standard_normal((min(rows, _BASE_ROWS), columns), np.float32) * columns**-0.5
        base = base.astype(ml_dtypes.bfloat16)
        for start in range(0, rows, len(base)):
            values[start : start + len(base)] = base[: rows - start]
        return values


@dataclasses.dataclass(frozen=True)
class RandomLinear(StoredLinear):
    """A linear map, packed at once where it is quantised."""

    seed: int = 0

    @property
    def scale_dtype(self) -> str | None:
        """safetensors' name of the scales' dtype; None when not quantised."""
        return None if self.scheme is None else "BF16"

    @property
    def nbytes(self) -> int:
        """Bytes in memory, packed."""
        if self.scheme is None:
            return 2 * self.out_features * self.in_features
        return packed_bytes(self.out_features, self.in_features, self.scheme.group_size)

    def read_packed(self) -> LinearWeights:
        """Packed weights."""
        if self.scheme is None:
            raise ValueError(f"{self.name} isn't quantised")
        return random_linear(self.out_features, self.in_features, self.scheme.group_size, self.seed)


@dataclasses.dataclass(frozen=True)
class RandomExperts(StoredExperts):
    """All experts of a layer, packed at once."""

    top_k: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0
    seed: int = 0

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        if self.scheme is None:
            raise ValueError(f"{self.name} isn't quantised")
        return self.scheme.group_size

    @property
    def nbytes(self) -> int:
        """Bytes in memory, packed."""
        group, experts = self.group_size, len(self)
        w13 = packed_bytes(2 * self.intermediate_size, self.hidden_size, group)
        return experts * (w13 + packed_bytes(self.hidden_size, self.intermediate_size, group))

    def read(self, progress: Callable[[int], None] = lambda nbytes: None) -> ExpertWeights:
        """Packed weights."""
        shape = LayerShape(len(self), self.top_k, self.hidden_size, self.intermediate_size)
        experts = random_experts(shape, self.group_size, self.seed)
        progress(self.nbytes)
        return experts


class _EveryModule:
    """Names of modules; any is among them."""

    def __contains__(self, name: object) -> bool:
        return True


class RandomCheckpoint:
    """Answers a model's requests for its modules as :class:`jax_w4a8.checkpoint.Checkpoint` does.

    Attributes:
      directory, where: named in errors.
      files: none, but they claim to have every module.
    """

    def __init__(self, name: str, group_size: int, quantized_head: bool) -> None:
        self.directory = self.where = f"random {name}"
        self.files = SimpleNamespace(modules=_EveryModule())
        self._scheme = Scheme("pack-quantized", group_size)
        self._quantized_head = quantized_head
        self._seed = 0

    def array(self, name: str, shape: Sequence[int], **options: Any) -> RandomArray:
        """A floating point tensor."""
        return RandomArray(_NO_FILES, name, sizes=tuple(shape), seed=self._next_seed())

    def embedding(self, name: str, rows: int, features: int) -> RandomArray:
        """A table."""
        return self.array(f"{name}.weight", (rows, features))

    def linear(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, nonzero: bool = False
    ) -> RandomLinear:
        """A linear map, quantised as checkpoints do."""
        is_float = not self._quantized_head if name == _HEAD else _FLOAT_MODULES.match(name) is not None
        stored_bias = self.array(f"{name}.bias", (out_features,)) if bias else None
        return RandomLinear(
            _NO_FILES,
            name,
            out_features,
            in_features,
            None if is_float else self._scheme,
            self.array(f"{name}.weight", (out_features, in_features)) if is_float else None,
            stored_bias,
            seed=self._next_seed(),
        )

    def skip(self, module: str) -> None:
        """There is nothing to leave out."""

    def tied_linear(self, name: str, embedding: StoredArray) -> None:
        """There is nothing to compare."""

    def finish(self) -> None:
        """There is nothing left over."""

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def random_plan(
    name: str, fields: dict[str, Any], group_size: int, quantized_head: bool
) -> tuple[DecoderConfig, DecoderPlan]:
    """A model's configuration and the modules that it will be made of; nothing large is made yet."""
    where = f"random {name}"
    family = find_family(fields["model_type"], where)
    config = family.configure(Fields(fields, where))
    checkpoint: Any = RandomCheckpoint(name, group_size, quantized_head)
    plan = plan_decoder(checkpoint, config, family.names)
    layers = tuple(_with_random_experts(layer, config.hidden_size, i) for i, layer in enumerate(plan.layers))
    return config, dataclasses.replace(plan, layers=layers)


def _with_random_experts(layer: Any, hidden_size: int, seed: int) -> Any:
    mlp = layer.mlp
    if not isinstance(mlp, MoEPlan):
        return layer
    stored = mlp.experts
    experts = RandomExperts(
        **{field.name: getattr(stored, field.name) for field in dataclasses.fields(stored)},
        top_k=mlp.config.routing.top_k,
        hidden_size=hidden_size,
        intermediate_size=mlp.config.intermediate_size,
        seed=seed,
    )
    return dataclasses.replace(layer, mlp=dataclasses.replace(mlp, experts=experts))
