"""The W4A8 linear map and MoE block as Flax NNX modules."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jax_w4a8.blocks import (
    MoEWeights,
    moe_block,
    quantize_for,
    random_experts,
    random_linear,
    with_bias,
)
from jax_w4a8.experts.base import Activation, check_activation_scheme
from jax_w4a8.linear import linear
from jax_w4a8.oracle import map_w4a8_int8_backend
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.routing import Routing
from jax_w4a8.weights import ExpertWeights, LinearWeights, pack_experts, pack_linear

Packed = TypeVar("Packed", LinearWeights, ExpertWeights)


class PackedWeight(nnx.Variable[Packed]):
    """Packed INT4 weights, a whole pytree; no ``nnx.Param``, so optimisers and ``nnx.grad`` pass it by."""


class CorrectionBias(nnx.Variable[jax.Array]):
    """A router's correction bias, which balances load and is not learnt by gradient: no ``nnx.Param``."""


class W4A8Linear(nnx.Module):
    """``x @ W.T + bias`` with INT4 weights and INT8 activations; see :func:`jax_w4a8.linear`.

    Attributes:
      weight: a :class:`PackedWeight` of :class:`jax_w4a8.LinearWeights`.
      bias: an ``nnx.Param`` ``[N]``, or None.
      in_features, out_features: K and N.
      dtype: what inputs are cast to, and so the result's dtype; None leaves them as they come.
      activation_scheme, backend: as for :func:`jax_w4a8.linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group_size: int | None = 128,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        activation_scheme: str = "asymmetric",
        backend: str = "auto",
        weight: LinearWeights | None = None,
        bias: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Holds ``weight``, or draws random ones (LeCun's rule) and quantises them.

        Args:
          in_features, out_features: K and N.
          group_size: inputs per scale of random weights, -1 for channel-wise; more than K is channel-wise.
          use_bias: whether random weights get a bias, zeros at first.
          dtype, activation_scheme, backend: see the class.
          weight: packed weights (:func:`jax_w4a8.pack_linear`); the leading axes of a stack of layers are
            for ``nnx.scan`` and ``nnx.vmap`` to take apart. A bias packed with them is kept.
          bias: floating point ``[N]``, trainable, in place of one that is packed.
          rngs: source of random weights; needed exactly when ``weight`` is None.

        Raises:
          TypeError, ValueError: an argument has the wrong type or value, or sizes don't fit ``weight``.
        """
        _check_options(activation_scheme, backend)
        if weight is None:
            weight = random_linear(_key(rngs, "weight"), in_features, out_features, group_size)
            bias = jnp.zeros(out_features, jnp.float32) if use_bias and bias is None else bias
        if not isinstance(weight, LinearWeights):
            raise TypeError(
                f"weight must be LinearWeights (see jax_w4a8.pack_linear), got {type(weight).__name__}"
            )
        if (weight.in_features, weight.out_features) != (in_features, out_features):
            raise ValueError(
                f"weight must map {in_features} features to {out_features}, it maps {weight.in_features} to "
                f"{weight.out_features}"
            )
        lead = tuple(weight.codes.shape[:-3])
        weight.check("weight", lead)
        if bias is not None and tuple(bias.shape) != (*lead, out_features):
            raise ValueError(f"bias must have shape {(*lead, out_features)}, got {tuple(bias.shape)}")
        self.weight = PackedWeight(weight)
        self.bias = None if bias is None else nnx.Param(bias)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.activation_scheme = activation_scheme
        self.backend = backend

    @classmethod
    def from_packed(cls, weight: LinearWeights, bias: ArrayLike | None = None, **options: Any) -> W4A8Linear:
        """Around packed weights, such as those of :func:`jax_w4a8.checkpoint.read_linear`.

        Args:
          weight: :class:`jax_w4a8.LinearWeights`.
          bias: floating point ``[..., N]``, or None.
          options: ``dtype``, ``activation_scheme`` and ``backend``, as for the class.

        Raises:
          TypeError, ValueError: as for the class.
        """
        if not isinstance(weight, LinearWeights):
            raise TypeError(
                f"weight must be LinearWeights (see jax_w4a8.pack_linear), got {type(weight).__name__}"
            )
        weight = jax.tree.map(jnp.asarray, weight)
        bias = None if bias is None else jnp.asarray(bias)
        return cls(weight.in_features, weight.out_features, weight=weight, bias=bias, **options)

    @classmethod
    def from_codes(cls, weight: QuantizedTensor, bias: ArrayLike | None = None, **options: Any) -> W4A8Linear:
        """As :meth:`from_packed`, from codes ``[..., N, K]`` with their scales."""
        return cls.from_packed(pack_linear(weight), bias, **options)

    @classmethod
    def from_float(
        cls,
        weight: ArrayLike,
        bias: ArrayLike | None = None,
        *,
        group_size: int | None = 128,
        scale_dtype: DTypeLike | None = None,
        **options: Any,
    ) -> W4A8Linear:
        """As :meth:`from_packed`, from float weights ``[..., N, K]`` (a Flax kernel is their transpose).

        ``group_size`` and ``scale_dtype`` are those of :func:`jax_w4a8.quantize`.
        """
        codes = quantize_for(jnp.asarray(weight), group_size, scale_dtype)
        return cls.from_codes(codes, bias, **options)

    def __call__(self, x: ArrayLike) -> jax.Array:
        """``[..., K]`` (float32, bfloat16 or float16) to ``[..., N]`` of the same dtype, or of ``dtype``."""
        if self.dtype is not None:
            x = jnp.asarray(x, self.dtype)
        bias = None if self.bias is None else self.bias.get_value()
        return linear(
            x,
            with_bias(self.weight.get_value(), bias),
            activation_scheme=self.activation_scheme,
            backend=self.backend,
        )


class W4A8MoE(nnx.Module):
    """A router, its INT4 experts, and shared experts if there are any; see :func:`jax_w4a8.moe`.

    Attributes:
      router: an ``nnx.Param`` ``[H, E]``; its product is computed in float32.
      router_bias: an ``nnx.Param`` ``[E]``, or None.
      correction_bias: a :class:`CorrectionBias` ``[E]``, or None.
      experts: a :class:`PackedWeight` of :class:`jax_w4a8.ExpertWeights`.
      shared: the same of one gated MLP that every token goes through, or None.
      shared_gate: an ``nnx.Param`` ``[H]``: the shared output's factor is the sigmoid of its product with x;
        or None.
      routing: how experts are chosen (:class:`jax_w4a8.Routing`).
      activation, activation_scheme, backend: as for :func:`jax_w4a8.moe`.
      dtype: what inputs are cast to, and so the result's dtype; None leaves them as they come.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        routing: Routing,
        *,
        group_size: int | None = 128,
        shared_intermediate_size: int | None = None,
        activation: str | Activation = "silu",
        dtype: DTypeLike | None = None,
        activation_scheme: str = "asymmetric",
        backend: str = "auto",
        weights: MoEWeights | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Holds ``weights``, or draws random ones (LeCun's rule) and quantises them.

        Args:
          num_experts, hidden_size, intermediate_size: E, H and I.
          routing: how experts are chosen.
          group_size: inputs per scale of random weights, -1 for channel-wise; more than the inputs are is
            channel-wise.
          shared_intermediate_size: width of the shared experts in all, for random weights; None for none.
          activation, dtype, activation_scheme, backend: see the class.
          weights: a :class:`jax_w4a8.blocks.MoEWeights` to hold.
          rngs: source of random weights; needed exactly when ``weights`` is None.

        Raises:
          TypeError, ValueError: an argument has the wrong type or value, or sizes don't fit ``weights``.
        """
        _check_options(activation_scheme, backend)
        if not isinstance(routing, Routing):
            raise TypeError(f"routing must be a Routing, got {type(routing).__name__}")
        routing.check(num_experts)
        self.activation = Activation(activation) if isinstance(activation, str) else activation
        if weights is None:
            weights = _random_moe(
                _key(rngs, "weights"),
                (num_experts, hidden_size, intermediate_size),
                shared_intermediate_size,
                group_size,
            )
        weights.check()
        experts = weights.experts
        sizes = (experts.num_experts, experts.hidden_size, experts.intermediate_size)
        if sizes != (num_experts, hidden_size, intermediate_size):
            raise ValueError(
                f"weights must have E, H, I = {(num_experts, hidden_size, intermediate_size)}, got {sizes}"
            )
        self.router = nnx.Param(weights.router)
        self.router_bias = None if weights.router_bias is None else nnx.Param(weights.router_bias)
        self.correction_bias = (
            None if weights.correction_bias is None else CorrectionBias(weights.correction_bias)
        )
        self.experts = PackedWeight(experts)
        self.shared = None if weights.shared is None else PackedWeight(weights.shared)
        self.shared_gate = None if weights.shared_gate is None else nnx.Param(weights.shared_gate)
        self.routing = routing
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.activation_scheme = activation_scheme
        self.backend = backend

    @classmethod
    def from_weights(cls, weights: MoEWeights, routing: Routing, **options: Any) -> W4A8MoE:
        """Around packed weights, such as those of :func:`jax_w4a8.checkpoint.read_moe`.

        Args:
          weights: :class:`jax_w4a8.blocks.MoEWeights`.
          routing: how experts are chosen.
          options: ``activation``, ``dtype``, ``activation_scheme`` and ``backend``, as for the class.

        Raises:
          TypeError, ValueError: as for the class.
        """
        weights = jax.tree.map(jnp.asarray, weights)
        experts = weights.experts
        return cls(
            experts.num_experts,
            experts.hidden_size,
            experts.intermediate_size,
            routing,
            weights=weights,
            **options,
        )

    @classmethod
    def from_codes(
        cls,
        w13: QuantizedTensor,
        w2: QuantizedTensor,
        router: ArrayLike,
        routing: Routing,
        *,
        w13_bias: ArrayLike | None = None,
        w2_bias: ArrayLike | None = None,
        router_bias: ArrayLike | None = None,
        correction_bias: ArrayLike | None = None,
        shared: tuple[QuantizedTensor, ...] | None = None,
        shared_gate: ArrayLike | None = None,
        **options: Any,
    ) -> W4A8MoE:
        """From codes with their scales.

        Args:
          w13: ``[E, 2I, H]``, gate first, then up.
          w2: ``[E, H, I]``.
          router: floating point ``[H, E]``.
          routing: how experts are chosen.
          w13_bias, w2_bias: ``[E, 2I]`` and ``[E, H]``, or None.
          router_bias, correction_bias: ``[E]``, or None.
          shared: ``[2S, H]`` and ``[H, S]`` of the shared experts as one MLP, or None.
          shared_gate: ``[H]``, or None.
          options: as for :meth:`from_weights`.

        Raises:
          TypeError, ValueError: as :func:`jax_w4a8.pack_experts` and the class.
        """
        weights = MoEWeights(
            router=jnp.asarray(router),
            experts=pack_experts(w13, w2, w13_bias, w2_bias),
            router_bias=_array(router_bias),
            correction_bias=_array(correction_bias),
            shared=None if shared is None else _pack_shared(shared),
            shared_gate=_array(shared_gate),
        )
        return cls.from_weights(weights, routing, **options)

    @classmethod
    def from_float(
        cls,
        w13: ArrayLike,
        w2: ArrayLike,
        router: ArrayLike,
        routing: Routing,
        *,
        group_size: int | None = 128,
        scale_dtype: DTypeLike | None = None,
        shared: tuple[ArrayLike, ArrayLike] | None = None,
        **options: Any,
    ) -> W4A8MoE:
        """As :meth:`from_codes`, from float weights, shared ones included; ``group_size`` and ``scale_dtype``
        are those of :func:`jax_w4a8.quantize`.
        """

        def codes(weights: ArrayLike) -> QuantizedTensor:
            return quantize_for(jnp.asarray(weights), group_size, scale_dtype)

        both = None if shared is None else tuple(codes(weights) for weights in shared)
        return cls.from_codes(codes(w13), codes(w2), router, routing, shared=both, **options)

    def weights(self) -> MoEWeights:
        """All weights as one pytree: what :func:`jax_w4a8.blocks.moe_block` takes."""
        return MoEWeights(
            router=self.router.get_value(),
            experts=self.experts.get_value(),
            router_bias=_value(self.router_bias),
            correction_bias=_value(self.correction_bias),
            shared=_value(self.shared),
            shared_gate=_value(self.shared_gate),
        )

    def __call__(self, x: ArrayLike) -> jax.Array:
        """``[..., H]`` (float32, bfloat16 or float16) to the same shape and dtype, or to ``dtype``."""
        return moe_block(
            jnp.asarray(x, self.dtype),
            self.weights(),
            self.routing,
            activation=self.activation,
            activation_scheme=self.activation_scheme,
            backend=self.backend,
        )


def _random_moe(
    key: jax.Array, sizes: tuple[int, int, int], shared: int | None, group_size: int | None
) -> MoEWeights:
    num_experts, hidden_size, _ = sizes
    router, experts, shared_key = jax.random.split(key, 3)
    return MoEWeights(
        router=jax.random.normal(router, (hidden_size, num_experts), jnp.float32) / hidden_size**0.5,
        experts=random_experts(experts, *sizes, group_size),
        shared=None if shared is None else random_experts(shared_key, 1, hidden_size, shared, group_size),
    )


def _pack_shared(shared: tuple[QuantizedTensor, ...]) -> ExpertWeights:
    if [type(weights) for weights in shared] != [QuantizedTensor, QuantizedTensor]:
        raise TypeError(
            f"shared must be codes of w13 and w2, got {[type(weights).__name__ for weights in shared]}"
        )
    return pack_experts(*(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], weights) for weights in shared))


def _key(rngs: nnx.Rngs | None, argument: str) -> jax.Array:
    if rngs is None:
        raise ValueError(f"rngs must be given where {argument} is None, to draw random weights from")
    key: jax.Array = rngs.params()
    return key


def _check_options(activation_scheme: str, backend: str) -> None:
    check_activation_scheme(activation_scheme)
    map_w4a8_int8_backend(backend, "backend")


def _array(value: ArrayLike | None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value)


def _value(variable: nnx.Variable[Any] | None) -> Any:
    return None if variable is None else variable.get_value()
