"""Which experts each token goes to, and with what weights. All of it is float32.

Compute the router's matrix product in float32 too: bfloat16 logits of magnitude 8 are 1/32 apart,
and so pick other experts than the model meant. :func:`route` can only widen what it is given.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_w4a8.invariance import barrier, evenly, ordered_sum

SCORINGS: tuple[str, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES: tuple[str, ...] = ("top2_sum", "max")
#: A sum of weights below this counts as zero, whether or not subnormal numbers are flushed.
_TINY = float(np.finfo(np.float32).tiny)
_LOWEST = float(np.finfo(np.float32).min)


def _require_integer(name: str, value: Any, smallest: int, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer{alternative}, got {value!r}")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}")


def _require_finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighted. Hashable, and static when passed through ``jit``.

    Attributes:
      top_k: experts per token.
      scoring: what turns logits into scores: ``softmax`` over all experts, ``sigmoid``, or
        ``sqrtsoftplus``, the square root of softplus (DeepSeek-V4).
      renormalize: divide the chosen scores by their sum; with ``softmax`` this equals a softmax
        over the chosen logits.
      num_expert_group: groups of consecutive experts to choose within; None, 0, 1 mean no groups.
      topk_group: groups per token that experts are taken from.
      group_score: ``max``, or ``top2_sum``, the sum of a group's two best scores (of its only one,
        if it has but one). None: ``top2_sum`` when there is a correction bias, else ``max``.
      routed_scaling_factor: multiplies the weights at the end.
      renormalize_epsilon: added to the sum that ``renormalize`` divides by: 1e-20 in DeepSeek's
        models, 1e-6 in LFM2's. Whatever it is, a sum of 0 gives weights of 0.

    Raises:
      TypeError, ValueError: on construction, naming the attribute, what was expected and what came.
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_expert_group: int | None = None
    topk_group: int | None = None
    group_score: str | None = None
    routed_scaling_factor: float = 1.0
    renormalize_epsilon: float = 0.0

    def __post_init__(self) -> None:
        _require_integer("top_k", self.top_k, 1)
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {list(SCORINGS)}, got {self.scoring!r}")
        if not isinstance(self.renormalize, bool):
            raise TypeError(f"renormalize must be True or False, got {self.renormalize!r}")
        for name in ("num_expert_group", "topk_group"):
            value = getattr(self, name)
            if value is not None:
                _require_integer(name, value, 0, " or None")
        groups, chosen = self.num_expert_group or 1, self.topk_group
        if groups > 1 and not chosen:
            raise ValueError(
                f"topk_group must be in [1, {groups}] for num_expert_group = {groups}, got {chosen}"
            )
        if chosen is not None and chosen > groups:
            raise ValueError(
                f"topk_group must be at most num_expert_group = {self.num_expert_group}, got {chosen}"
            )
        if self.group_score is not None and self.group_score not in GROUP_SCORES:
            raise ValueError(
                f"group_score must be one of {list(GROUP_SCORES)} or None, got {self.group_score!r}"
            )
        _require_finite("routed_scaling_factor", self.routed_scaling_factor)
        _require_finite("renormalize_epsilon", self.renormalize_epsilon)
        if self.renormalize_epsilon < 0:
            raise ValueError(f"renormalize_epsilon must not be negative, got {self.renormalize_epsilon}")

    @property
    def num_groups(self) -> int:
        """Groups that the choice distinguishes, at least 1."""
        return self.num_expert_group or 1

    def check(self, num_experts: int) -> None:
        """Raises ValueError unless a layer of ``num_experts`` experts can be routed this way."""
        groups = self.num_groups
        if num_experts % groups:
            raise ValueError(
                f"num_expert_group must divide the number of experts, {num_experts}, got {groups}"
            )
        if self.top_k > num_experts:
            raise ValueError(f"top_k must be at most the number of experts, {num_experts}, got {self.top_k}")
        within = num_experts // groups * (self.topk_group or 1)
        if groups > 1 and self.top_k > within:
            raise ValueError(
                f"top_k must be at most {within}, the experts of topk_group = {self.topk_group} "
                f"groups of {num_experts // groups}, got {self.top_k}"
            )


def _normalize(x: jax.Array, epsilon: float = 0.0) -> jax.Array:
    """Divides by the sum of the last axis (plus ``epsilon``); zeros where that sum is 0."""
    total = ordered_sum(x)
    empty = total < _TINY
    # The barrier keeps XLA from multiplying by a reciprocal, in some shapes and not in others.
    divisor = jnp.broadcast_to(jnp.where(empty, 1, total + epsilon), x.shape)
    return jnp.where(empty, 0, x / barrier(divisor))


def _softmax(x: jax.Array) -> jax.Array:
    peak = lax.stop_gradient(x.max(axis=-1, keepdims=True))
    return _normalize(evenly(jnp.exp, x - jnp.where(peak == -jnp.inf, 0, peak)))


def _sqrt_softplus(x: jax.Array) -> jax.Array:
    # Far below zero softplus(x) is exp(x), which is subnormal long before its root is.
    far = -16.0
    root = jnp.sqrt(jax.nn.softplus(jnp.where(x < far, far, x)))
    return jnp.where(x < far, jnp.exp(jnp.where(x < far, x, far) / 2), root)


def _score(logits: jax.Array, scoring: str) -> jax.Array:
    if scoring == "softmax":
        return _softmax(logits)
    return evenly(jax.nn.sigmoid if scoring == "sigmoid" else _sqrt_softplus, logits)


def _rankable(x: jax.Array) -> jax.Array:
    """``lax.top_k`` tells -0 from 0 and NaN from NaN: here zeros are equal, and NaN is infinity."""
    x = jnp.where(x == 0, 0.0, x)
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _outside_groups(ranks: jax.Array, scores: jax.Array, routing: Routing, score: str) -> jax.Array:
    """True for the experts ``[..., E]`` of groups that aren't chosen."""
    size = ranks.shape[-1] // routing.num_groups
    grouped = (*ranks.shape[:-1], routing.num_groups, size)
    if score == "max":
        group_scores = ranks.reshape(grouped).max(axis=-1)
    else:
        per_group = scores.reshape(grouped)
        group_scores = _rankable(lax.top_k(per_group, min(2, size))[0].sum(axis=-1))
    chosen = lax.top_k(group_scores, routing.topk_group or 1)[1]
    groups = jnp.arange(routing.num_groups, dtype=chosen.dtype)
    outside = (chosen[..., None] != groups).all(axis=-2)
    return jnp.repeat(outside, size, axis=-1)


def _choose(logits: jax.Array, scores: jax.Array, bias: jax.Array | None, routing: Routing) -> jax.Array:
    """Ids int32 ``[..., k]``, best first."""
    if bias is not None:
        scores = scores + bias
    # Scores grow with logits, which keep their order where scores round to the same number.
    ranks = _rankable(logits if bias is None else scores)
    if routing.num_groups > 1:
        score = routing.group_score or ("max" if bias is None else "top2_sum")
        outside = _outside_groups(ranks, _rankable(scores), routing, score)
        ranks = jnp.where(outside, -jnp.inf, jnp.maximum(ranks, _LOWEST))
    return lax.top_k(ranks, routing.top_k)[1].astype(jnp.int32)


def route(
    router_logits: ArrayLike, routing: Routing, correction_bias: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses each token's experts and their weights.

    The scores of all experts come first. With groups, only the experts of the best ``topk_group``
    groups stay in the choice. The ``top_k`` best are chosen; of equal ones the lower id comes
    first, among experts and among groups. Their scores, renormalised or not, times
    ``routed_scaling_factor`` are the weights.

    Ids are distinct and in range whatever the logits are. NaN ranks above everything; a token with
    NaN or +infinity among its logits may get NaN weights, and no other token does. A logit of
    -infinity gives weight 0. A token's result doesn't depend on the tokens around it, to the bit.

    Weights are differentiable in the logits, ids in nothing.

    The scheme is that of the DeepSeek-V2/V3 reports; without groups and bias it is Mixtral's
    (``softmax``, renormalised), OLMoE's (not renormalised) and their relatives'.

    Args:
      router_logits: ``[..., E]``, floating point, cast to float32 at once. Compute them in float32.
      routing: the :class:`Routing`.
      correction_bias: ``[E]``, floating point, used in float32; added to the scores for the choice
        (of groups too) and never part of a weight.

    Returns:
      weights float32 ``[..., k]`` and ids int32 ``[..., k]``, best first.

    Raises:
      TypeError: ``routing`` is no :class:`Routing`, or an array is not floating point.
      ValueError: a shape is wrong, ``num_expert_group`` doesn't divide E, or ``top_k`` exceeds E or
        the number of experts in the chosen groups.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing must be a Routing, got {type(routing).__name__}")
    logits = _as_float32("router_logits", router_logits)
    if logits.ndim < 1:
        raise ValueError("router_logits must have shape [..., E], got a scalar")
    num_experts = logits.shape[-1]
    routing.check(num_experts)
    bias = None
    if correction_bias is not None:
        bias = _as_float32("correction_bias", correction_bias)
        if bias.shape != (num_experts,):
            raise ValueError(f"correction_bias must have shape {(num_experts,)}, got {bias.shape}")
    weights, ids = _route(logits, routing, bias)
    return weights, ids


# Compiled as one, so that a call outside jit is one dispatch, and a model's layers share one trace.
@jax.jit
def _route(logits: jax.Array, routing: Routing, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    scores = _score(logits, routing.scoring)
    ids = _choose(*lax.stop_gradient((logits, scores, bias)), routing)
    if routing.scoring == "softmax" and routing.renormalize and not routing.renormalize_epsilon:
        # Equal to renormalised scores, and exact where those underflow.
        weights = _softmax(_take(logits, ids))
    else:
        weights = _take(scores, ids)
        if routing.renormalize:
            weights = _normalize(weights, float(routing.renormalize_epsilon))
    return weights * float(routing.routed_scaling_factor), ids


def _take(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, ids, axis=-1, mode="promise_in_bounds")


def _as_float32(name: str, value: ArrayLike) -> jax.Array:
    array = jnp.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating point array, got {array.dtype}")
    return array.astype(jnp.float32)
