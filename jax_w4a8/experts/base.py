"""What a backend declares: the four operations of this package, and which configurations it takes."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_w4a8.quantization import QuantKey
from jax_w4a8.routing import Routing
from jax_w4a8.weights import ExpertWeights, LinearWeights

ActivationScheme = Literal["asymmetric", "symmetric"]
ACTIVATION_SCHEMES: tuple[str, ...] = ("asymmetric", "symmetric")
ACTIVATIONS: tuple[str, ...] = ("silu", "swigluoai", "gelu", "gelu_tanh")
INPUT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


@dataclasses.dataclass(frozen=True)
class Activation:
    """The gated activation between an expert's projections, computed in float32.

    Attributes:
      kind: ``silu``: gate * sigmoid(gate) * up. ``gelu``, ``gelu_tanh``: gelu(gate) * up, exact or by tanh.
        ``swigluoai`` (gpt-oss): gate clamped above by ``limit``, up on both sides, then
        (up + 1) * gate * sigmoid(alpha * gate).
      alpha, limit: parameters of ``swigluoai``; ``limit=None`` clamps nothing.
    """

    kind: str = "silu"
    alpha: float = 1.702
    limit: float | None = 7.0

    def __post_init__(self) -> None:
        if self.kind not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {self.kind!r}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit must be positive or None, got {self.limit}")


@dataclasses.dataclass(frozen=True)
class ExpertOptions:
    """Everything about an expert call that is not an array: static under ``jit``."""

    activation: Activation = Activation()
    activation_scheme: str = "asymmetric"
    apply_router_weight_on_input: bool = False

    def __post_init__(self) -> None:
        check_activation_scheme(self.activation_scheme)


def check_activation_scheme(scheme: str) -> None:
    """Raises ValueError unless ``scheme`` is one of :data:`ACTIVATION_SCHEMES`."""
    if scheme not in ACTIVATION_SCHEMES:
        raise ValueError(
            f"activation_scheme must be one of {list(ACTIVATION_SCHEMES)}, got {scheme!r}"
        )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """What the oracle asks backends about.

    Attributes:
      num_experts, top_k, hidden_size, intermediate_size: sizes of the layer.
      in_dtype: dtype of the tokens: float32, bfloat16 or float16.
      activation: an :class:`Activation` or its kind.
      activation_scheme: ``asymmetric`` or ``symmetric``.
      routing: how experts are chosen; None when routing happens elsewhere.
      ep_size, tp_size: expert- and tensor-parallel shards.
      platform: a JAX platform name; None for the default backend's.
      moe_backend: ``auto``, ``cpu_int4`` or ``xla``.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    in_dtype: Any = jnp.float32
    activation: Activation | str = Activation()
    activation_scheme: str = "asymmetric"
    routing: Routing | None = None
    ep_size: int = 1
    tp_size: int = 1
    platform: str | None = None
    moe_backend: str = "auto"


class Backend(abc.ABC):
    """One implementation of the expert call and of the dense linear. Never instantiated.

    Arguments arrive canonical: ``x`` is ``[T, H]`` of a supported dtype, ids int32 ``[T, k]``, router weights
    float32 ``[T, k]``, everything checked by the functional layer.
    """

    name: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def unavailable_reason(cls, platform: str) -> str | None:
        """Why this backend can't run on ``platform`` here, or None when it can."""

    @classmethod
    def is_supported_config(
        cls, config: MoEConfig, weight_key: QuantKey, activation_key: QuantKey | None
    ) -> tuple[bool, str | None]:
        """Whether the backend runs this layer, and the reason when it doesn't."""
        reason = cls.unavailable_reason(config.platform or jax.default_backend())
        reason = reason or unsupported_reason(config, weight_key, activation_key)
        return reason is None, reason

    @classmethod
    @abc.abstractmethod
    def fused_experts(
        cls,
        x: jax.Array,
        weights: jax.Array,
        ids: jax.Array,
        experts: ExpertWeights,
        options: ExpertOptions,
    ) -> jax.Array:
        """Experts and combine in one: ``[T, H]`` in the dtype of ``x``."""

    @classmethod
    @abc.abstractmethod
    def apply_experts(
        cls,
        x: jax.Array,
        weights: jax.Array | None,
        ids: jax.Array,
        experts: ExpertWeights,
        options: ExpertOptions,
    ) -> jax.Array:
        """Each slot's expert output, unweighted: float32 ``[T, k, H]``.

        ``weights`` are given exactly when the options apply them to the input.
        """

    @classmethod
    @abc.abstractmethod
    def combine(cls, slots: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
        """Sum over slots of weight x output, ascending, in float32, rounded once to ``dtype``: ``[T, H]``."""

    @classmethod
    @abc.abstractmethod
    def linear(
        cls, x: jax.Array, weights: LinearWeights, activation_scheme: str
    ) -> jax.Array:
        """``[T, out]`` in the dtype of ``x``."""


def unsupported_reason(
    config: MoEConfig, weight_key: QuantKey, activation_key: QuantKey | None
) -> str | None:
    """The reason why no backend of this package runs the layer, or None: the contract they all share."""
    raise NotImplementedError
