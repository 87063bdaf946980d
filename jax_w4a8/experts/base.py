"""What a backend declares: the five operations of this package, and which configurations it takes."""

from __future__ import annotations

import abc
import dataclasses
import math
import numbers
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_w4a8.partition import expert_split_reason, intermediate_split_reason
from jax_w4a8.quantization import (
    CHANNELWISE,
    GROUP_MULTIPLE,
    SCALE_DTYPES,
    GroupShape,
    QuantKey,
    normalize_group_size,
)
from jax_w4a8.routing import Routing
from jax_w4a8.weights import ExpertWeights, LinearWeights

ActivationScheme = Literal["asymmetric", "symmetric"]
ACTIVATION_SCHEMES: tuple[str, ...] = ("asymmetric", "symmetric")
ACTIVATIONS: tuple[str, ...] = ("silu", "swigluoai", "gelu", "gelu_tanh")
INPUT_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
#: float16 is widened when weights are packed.
WEIGHT_SCALE_DTYPES = (*SCALE_DTYPES, jnp.dtype(jnp.float16))


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
        for name in ("alpha", "limit"):
            value = getattr(self, name)
            if not isinstance(value, int | float | np.number) and not (name == "limit" and value is None):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha must be finite, got {self.alpha}")
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
        raise ValueError(f"activation_scheme must be one of {list(ACTIVATION_SCHEMES)}, got {scheme!r}")


def check_tokens(x: ArrayLike, features: int, name: str = "x") -> jax.Array:
    """``x`` as an array of shape ``[..., features]`` and a supported dtype, else TypeError or ValueError."""
    array = jnp.asarray(x)
    if array.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {array.dtype}")
    if array.ndim < 1 or array.shape[-1] != features:
        raise ValueError(f"{name} must have shape [..., {features}], got {array.shape}")
    return array


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
    """One implementation of the expert call and of linear maps. Never instantiated.

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
    def linear(cls, x: jax.Array, weights: LinearWeights, activation_scheme: str) -> jax.Array:
        """``[T, out]`` in the dtype of ``x``."""

    @classmethod
    @abc.abstractmethod
    def grouped_linear(
        cls, x: jax.Array, ids: jax.Array, weights: LinearWeights, activation_scheme: str
    ) -> jax.Array:
        """``[T, out]`` in the dtype of ``x``: each row by the matrix that its id (int32 ``[T]``) names out of
        a stack of E; zeros for id -1.
        """


def unsupported_reason(
    config: MoEConfig, weight_key: QuantKey, activation_key: QuantKey | None
) -> str | None:
    """Why no backend of this package runs the layer, or None: the contract that they all share.

    Any group size that is a multiple of 32 and any routing are accepted. ``activation_key`` is
    what a checkpoint declares; its symmetry is no reason to refuse: ``activation_scheme`` decides.
    Being per token it is dynamic: a :class:`QuantKey` has no static kind of that shape.
    """
    return (
        _size_reason(config)
        or _computation_reason(config)
        or _weight_reason(weight_key)
        or _group_reason(config, weight_key)
        or _activation_reason(activation_key)
        or _parallel_reason(config, weight_key.group_shape[1])
    )


def _as_dtype(value: Any) -> Any:
    try:
        return jnp.dtype(value)
    except TypeError:
        return None


def _dtype_name(value: Any) -> str:
    dtype = _as_dtype(value)
    return repr(value) if dtype is None else str(dtype)


def _size_reason(config: MoEConfig) -> str | None:
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size", "ep_size", "tp_size")
    for name in names:
        size = getattr(config, name)
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            return f"{name} must be a positive integer, got {size!r}"
    if config.top_k > config.num_experts:
        return f"top_k = {config.top_k} experts can't be chosen out of E = {config.num_experts}"
    routing = config.routing
    if routing is None:
        return None
    if not isinstance(routing, Routing):
        return f"routing must be a Routing or None, got {routing!r}"
    if routing.top_k != config.top_k:
        return f"routing.top_k must equal top_k = {config.top_k}, got {routing.top_k}"
    try:
        routing.check(config.num_experts)
    except ValueError as error:
        return f"routing: {error}"
    return None


def _computation_reason(config: MoEConfig) -> str | None:
    if _as_dtype(config.in_dtype) not in INPUT_DTYPES:
        return f"in_dtype must be float32, bfloat16 or float16, got {_dtype_name(config.in_dtype)}"
    activation = config.activation
    if not isinstance(activation, Activation) and activation not in ACTIVATIONS:
        return f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}"
    if config.activation_scheme not in ACTIVATION_SCHEMES:
        return (
            f"activation_scheme must be one of {list(ACTIVATION_SCHEMES)}, got {config.activation_scheme!r}"
        )
    return None


def _weight_reason(key: QuantKey) -> str | None:
    if _as_dtype(key.dtype) != jnp.int4:
        return f"weights must be int4, got {_dtype_name(key.dtype)}"
    if not key.symmetric:
        return "weights must be symmetric, got asymmetric ones (with zero points)"
    if _as_dtype(key.scale_dtype) not in WEIGHT_SCALE_DTYPES:
        return f"weight scales must be bfloat16, float16 or float32, got {_dtype_name(key.scale_dtype)}"
    row, col = key.group_shape
    if (row, col) != (-1, 1) and (row != 1 or col < 1 or col % GROUP_MULTIPLE):
        return (
            "weight group_shape must be (-1, 1) for channel-wise or (1, g) with g a positive "
            f"multiple of {GROUP_MULTIPLE}, got {(row, col)}"
        )
    return None


def _group_reason(config: MoEConfig, key: QuantKey) -> str | None:
    """Too many inputs to a scale, in either projection."""
    group_size = GroupShape(*key.group_shape).group_size
    try:
        for inputs in (config.hidden_size, config.intermediate_size):
            normalize_group_size(group_size, inputs)
    except ValueError as error:
        return f"weights: {error}"
    return None


def _activation_reason(key: QuantKey | None) -> str | None:
    if key is None:
        return None
    if _as_dtype(key.dtype) != jnp.int8:
        return f"activations must be int8, got {_dtype_name(key.dtype)}"
    if tuple(key.group_shape) != (1, -1):
        return f"activations must be quantised per token, group_shape (1, -1), got {tuple(key.group_shape)}"
    return None


def _parallel_reason(config: MoEConfig, group: int) -> str | None:
    """``group`` is the weights' group size; 1, from (-1, 1), when channel-wise."""
    return expert_split_reason(config.num_experts, config.ep_size) or intermediate_split_reason(
        config.intermediate_size, CHANNELWISE if group == 1 else group, config.tp_size
    )
