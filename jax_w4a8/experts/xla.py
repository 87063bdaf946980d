"""The pure-JAX backend: the contract written in jnp, and what platforms without a native kernel run.

Slots are sorted by expert and cut into tiles of equal height that hold one expert's tokens each; a scan over
the tiles unpacks that expert's weights and no other's. The number of tiles is static (S / height + E).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8.experts.base import Activation, Backend, ExpertOptions
from jax_w4a8.weights import ExpertWeights, LinearWeights, unpack_linear

#: Rows whose range (or magnitude) is below this count as zero; their reciprocal scale would overflow.
SMALLEST_RANGE = 2.0**-100
_TILE_ROWS = 32

Stack = TypeVar("Stack", ExpertWeights, LinearWeights)


class QuantizedRows(NamedTuple):
    """Activations by rule 1 of the contract: value = (code - zero) * scale.

    ``codes`` int8 ``[M, K]``; ``zero`` float32 ``[M]``, whole numbers; ``scale`` float32 ``[M]``, NaN for a
    row that held NaN or infinity, 0 for one too small to have a scale.
    """

    codes: jax.Array
    zero: jax.Array
    scale: jax.Array


def quantize_rows(x: jax.Array, scheme: str) -> QuantizedRows:
    """Quantises each row of float32 ``[M, K]`` to INT8, by ``asymmetric`` or ``symmetric`` scheme."""
    finite = jnp.isfinite(x).all(axis=-1, keepdims=True)
    x = jnp.where(finite, x, 0)
    low = jnp.minimum(x.min(axis=-1, keepdims=True, initial=0), 0)
    high = jnp.maximum(x.max(axis=-1, keepdims=True, initial=0), 0)
    if scheme == "symmetric":
        extent = jnp.maximum(-low, high)
        usable = extent >= SMALLEST_RANGE
        factor = 127 / jnp.where(usable, extent, 1)
        zero = jnp.zeros_like(extent)
        scale = jnp.where(usable, extent, 0) / 127
        smallest = -127
    else:
        extent = high - low
        finite = finite & jnp.isfinite(extent)
        usable = extent >= SMALLEST_RANGE
        factor = 255 / jnp.where(usable, extent, 1)
        below, above = low * factor, high * factor
        zero = jnp.where((below + above) - 1 > 0, -128 - below, 127 - above)
        zero = jnp.where(usable, jnp.round(jnp.clip(zero, -128, 127)), 0)
        scale = jnp.where(usable, 1 / factor, 0)
        smallest = -128
    codes = jnp.where(usable, jnp.clip(jnp.round(x * factor) + zero, smallest, 127), 0)
    return QuantizedRows(codes.astype(jnp.int8), zero[:, 0], jnp.where(finite, scale, jnp.nan)[:, 0])


def _matmul(rows: QuantizedRows, weights: LinearWeights) -> jax.Array:
    """Rule 3 of the contract: float32 ``[M, 16 * NB]``, filled-up channels included."""
    groups = weights.codes.shape[1]
    width = weights.group_width
    tensor, _ = unpack_linear(without_filling(weights))
    codes = tensor.codes.reshape(-1, groups, width)
    padding = groups * width - rows.codes.shape[-1]
    x = jnp.pad(rows.codes, ((0, 0), (0, padding))).reshape(-1, groups, width)
    sums = jnp.einsum("mgk,ngk->gmn", x, codes, preferred_element_type=jnp.int32)
    scale = jnp.moveaxis(weights.scale, -2, 0).reshape(groups, -1).astype(jnp.float32)

    def add_group(total: jax.Array, group: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + group[0].astype(jnp.float32) * group[1], None

    # Made of the sums, so that it varies over the same axes of a mesh inside shard_map.
    total = jnp.zeros_like(sums, shape=sums.shape[1:], dtype=jnp.float32)
    total, _ = lax.scan(add_group, total, (sums, scale))
    total = total - rows.zero[:, None] * weights.scaled_sum.reshape(-1)
    return total * rows.scale[:, None] + weights.bias.reshape(-1)


def without_filling(weights: LinearWeights) -> LinearWeights:
    """The same arrays, declared to be exactly as large as their blocks are."""
    blocks, groups, _ = weights.codes.shape
    return LinearWeights(
        weights.codes,
        weights.scale,
        weights.scaled_sum,
        weights.bias,
        out_features=16 * blocks,
        in_features=groups * weights.group_width,
        group_size=weights.group_width if groups > 1 else -1,
    )


def activate(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Rule 4 of the contract, elementwise in float32."""
    if activation.kind == "silu":
        return gate * jax.nn.sigmoid(gate) * up
    if activation.kind == "swigluoai":
        limit = math.inf if activation.limit is None else activation.limit
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        return (up + 1) * (gate * jax.nn.sigmoid(activation.alpha * gate))
    if activation.kind == "gelu_tanh":
        # 0.5 (1 + tanh(y)) = sigmoid(2 y), without the cancellation.
        return gate * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up
    return jax.nn.gelu(gate, approximate=False) * up


def _expert(x: jax.Array, experts: ExpertWeights, options: ExpertOptions) -> jax.Array:
    """One expert (leaves without the E axis) on float32 rows ``[M, H]``: float32 ``[M, H]``."""
    scheme = options.activation_scheme
    hidden = _matmul(quantize_rows(x, scheme), experts.w13)
    pairs = hidden.reshape(x.shape[0], -1, 2, 16)
    gate, up = (pairs[:, :, side].reshape(x.shape[0], -1)[:, : experts.intermediate_size] for side in (0, 1))
    inner = activate(gate, up, options.activation)
    return _matmul(quantize_rows(inner, scheme), experts.w2)[:, : experts.hidden_size]


class Tiles(NamedTuple):
    """Slots in groups of at most M that go to one expert each.

    ``expert`` int32 ``[tiles]``; ``slots`` int32 ``[tiles, M]``, S where a tile has fewer than M of them;
    ``used`` int32, how many tiles, from the first on, have any.
    """

    expert: jax.Array
    slots: jax.Array
    used: jax.Array


def tile_height(slots: int, num_experts: int, largest: int) -> int:
    """Rows of a tile for that many slots: about as many as an expert gets."""
    if not isinstance(slots, int):  # a symbolic size, in an export
        return largest
    return min(largest, 1 << max(0, slots // num_experts).bit_length())


def tile_slots(ids: jax.Array, num_experts: int, height: int) -> Tiles:
    """Groups valid slots of int32 ``[S]`` by expert, ascending; slots of other ids are in no tile."""
    total = ids.shape[0]
    key = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    count = jnp.bincount(key, length=num_experts + 1)[:num_experts]
    first_slot = jnp.cumsum(count) - count
    tiles = -(-count // height)
    last_tile = jnp.cumsum(tiles)
    partly_filled = min(num_experts, total) if isinstance(total, int) else num_experts
    number = jnp.arange(total // height + partly_filled)
    expert = jnp.minimum(jnp.searchsorted(last_tile, number, side="right"), num_experts - 1)
    row = (number - (last_tile - tiles)[expert])[:, None] * height + jnp.arange(height)
    within = (row < count[expert][:, None]) & (number < last_tile[-1])[:, None]
    position = jnp.where(within, first_slot[expert][:, None] + row, 0)
    slots = jnp.where(within, order[position], total)
    return Tiles(expert.astype(jnp.int32), slots.astype(jnp.int32), last_tile[-1].astype(jnp.int32))


def _by_tiles(
    run: Callable[[jax.Array, Stack], jax.Array],
    rows: jax.Array,
    ids: jax.Array,
    stack: Stack,
    num_experts: int,
    columns: int,
) -> jax.Array:
    """Runs each slot by the element of a stack that its id names.

    Args:
      run: float32 rows ``[M, K]`` and one element to float32 ``[M, columns]``.
      rows: float32 ``[S / k, K]``: k consecutive slots share a row.
      ids: int32 ``[S]``, S > 0.
      stack: a pytree with leading axes ``num_experts``.

    Returns:
      float32 ``[S, columns]``: zeros for id -1, NaN for other ids that name none.
    """
    total = ids.shape[0]
    k = total // rows.shape[0]
    tiles = tile_slots(ids, num_experts, tile_height(total, num_experts, _TILE_ROWS))

    def run_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert, slots = tile
        one = jax.tree.map(lambda leaf: leaf[expert], stack)
        return run(rows[jnp.minimum(slots, total - 1) // k], one)

    outputs = lax.map(run_tile, (tiles.expert, tiles.slots))
    y = jnp.zeros((total, columns), jnp.float32)
    y = y.at[tiles.slots.reshape(-1)].set(outputs.reshape(-1, columns), mode="drop")
    wrong = (ids < -1) | (ids >= num_experts)
    return jnp.where(wrong[:, None], jnp.nan, y)


# Compiled as wholes, so that calls outside jit compile once and give what calls inside do.
@functools.partial(jax.jit, static_argnames="options")
def _apply_experts(
    x: jax.Array,
    weights: jax.Array | None,
    ids: jax.Array,
    experts: ExpertWeights,
    options: ExpertOptions,
) -> jax.Array:
    tokens, k = ids.shape
    if tokens * k == 0:
        return jnp.zeros((tokens, k, experts.hidden_size), jnp.float32)
    rows = x.astype(jnp.float32)
    if weights is not None:
        rows = rows * weights
    slots = _by_tiles(
        lambda rows, one: _expert(rows, one, options),
        rows,
        ids.reshape(-1),
        experts,
        experts.num_experts,
        experts.hidden_size,
    )
    return slots.reshape(tokens, k, -1)


@functools.partial(jax.jit, static_argnames="dtype")
def _combine(slots: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
    total = jnp.zeros((slots.shape[0], slots.shape[2]), jnp.float32)
    for slot in range(slots.shape[1]):
        total = total + weights[:, slot, None] * slots[:, slot]
    return total.astype(dtype)


@functools.partial(jax.jit, static_argnames="activation_scheme")
def _linear(x: jax.Array, weights: LinearWeights, activation_scheme: str) -> jax.Array:
    rows = quantize_rows(x.astype(jnp.float32), activation_scheme)
    return _matmul(rows, weights)[:, : weights.out_features].astype(x.dtype)


@functools.partial(jax.jit, static_argnames="activation_scheme")
def _grouped_linear(
    x: jax.Array, ids: jax.Array, weights: LinearWeights, activation_scheme: str
) -> jax.Array:
    if x.shape[0] == 0:
        return jnp.zeros((0, weights.out_features), x.dtype)
    y = _by_tiles(
        lambda rows, one: _matmul(quantize_rows(rows, activation_scheme), one)[:, : weights.out_features],
        x.astype(jnp.float32),
        ids,
        weights,
        weights.codes.shape[0],
        weights.out_features,
    )
    return y.astype(x.dtype)


class XLAExperts(Backend):
    """Pure JAX, on any platform; agrees with the native kernels to 1e-5."""

    name = "xla"

    @classmethod
    def unavailable_reason(cls, platform: str) -> str | None:
        """Always None: every platform runs it."""
        return None

    @classmethod
    def fused_experts(
        cls,
        x: jax.Array,
        weights: jax.Array,
        ids: jax.Array,
        experts: ExpertWeights,
        options: ExpertOptions,
    ) -> jax.Array:
        """See :meth:`Backend.fused_experts`."""
        on_input = options.apply_router_weight_on_input
        slots = _apply_experts(x, weights if on_input else None, ids, experts, options)
        if on_input:
            weights = jnp.ones_like(weights)
        return _combine(slots, jnp.where(ids == -1, 0, weights), x.dtype)

    @classmethod
    def apply_experts(
        cls,
        x: jax.Array,
        weights: jax.Array | None,
        ids: jax.Array,
        experts: ExpertWeights,
        options: ExpertOptions,
    ) -> jax.Array:
        """See :meth:`Backend.apply_experts`."""
        return _apply_experts(x, weights, ids, experts, options)

    @classmethod
    def combine(cls, slots: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
        """See :meth:`Backend.combine`."""
        return _combine(slots, weights, dtype)

    @classmethod
    def linear(cls, x: jax.Array, weights: LinearWeights, activation_scheme: str) -> jax.Array:
        """See :meth:`Backend.linear`."""
        return _linear(x, weights, activation_scheme)

    @classmethod
    def grouped_linear(
        cls, x: jax.Array, ids: jax.Array, weights: LinearWeights, activation_scheme: str
    ) -> jax.Array:
        """See :meth:`Backend.grouped_linear`."""
        return _grouped_linear(x, ids, weights, activation_scheme)
