"""Gradients of the float model: what the operations compute if no activation were quantised.

Slots are sorted by expert and cut into tiles, as in the pure-JAX backend. A loop over the tiles that hold any
dequantises one expert's weights and leaves the matrix products to XLA, which gives them all threads. So one
expert's weights are float at any time (and as much again of products, where scales have gradients), and
experts without tokens cost nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_w4a8.experts.base import ExpertOptions
from jax_w4a8.experts.xla import activate, tile_height, tile_slots, without_filling
from jax_w4a8.packing import BLOCK_CHANNELS
from jax_w4a8.weights import ExpertWeights, LinearWeights, unpack_linear

_HIGHEST = lax.Precision.HIGHEST
_TILE_ROWS = 256
#: Float weights of a linear map that are alive at a time.
_CHUNK_WEIGHTS = 1 << 22

Gradients = dict[str, jax.Array]


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """float32 product of two matrices that contracts one axis of each."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), precision=_HIGHEST)


class _Dequantized:
    """The float weights of one matrix, filling included: float32 ``[16 * NB, G * width]``."""

    def __init__(self, weights: LinearWeights) -> None:
        tensor, self.bias = unpack_linear(without_filling(weights))
        self._codes = tensor.codes
        self._packed_scale = weights.scale
        self.values = tensor.dequantize()

    def scale_gradient(self, gradient: jax.Array) -> jax.Array:
        """``[NB, G, 16]`` from the gradient of ``values``."""
        groups = self._packed_scale.shape[-2]
        products = gradient * self._codes.astype(jnp.float32)
        sums = products.reshape(-1, BLOCK_CHANNELS, groups, products.shape[1] // groups).sum(axis=-1)
        return jnp.swapaxes(sums, -1, -2)


def _fill(x: jax.Array, columns: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))


def _split_sides(hidden: jax.Array, intermediate: int) -> tuple[jax.Array, jax.Array]:
    """Gate and up ``[M, I]`` out of alternating blocks."""
    pairs = hidden.reshape(hidden.shape[0], -1, 2, BLOCK_CHANNELS)
    gate, up = (pairs[:, :, side].reshape(hidden.shape[0], -1)[:, :intermediate] for side in (0, 1))
    return gate, up


def _join_sides(gate: jax.Array, up: jax.Array, columns: int) -> jax.Array:
    """The inverse of :func:`_split_sides`, zeros in the filling."""
    sides = [_fill(side, columns // 2).reshape(gate.shape[0], -1, BLOCK_CHANNELS) for side in (gate, up)]
    return jnp.stack(sides, axis=2).reshape(gate.shape[0], columns)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """``array[index]``. XLA slices bfloat16 as float32 on CPU, and would widen all of it before the loop."""
    if array.dtype != jnp.bfloat16:
        return array[index]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(array, jnp.uint16)[index], jnp.bfloat16)


class _Tile(NamedTuple):
    """Slots of one expert, gathered; rows beyond them are zero.

    ``slots`` and ``tokens`` int32 ``[M]`` are S and T for those. ``x`` and ``cotangent`` are float32
    ``[M, H]``; ``on_input`` and ``on_output`` float32 ``[M, 1]``: router weights on the side that they
    multiply, ones on the other.
    """

    slots: jax.Array
    tokens: jax.Array
    x: jax.Array
    cotangent: jax.Array
    on_input: jax.Array
    on_output: jax.Array


def _gather(
    slots: jax.Array,
    cotangent: jax.Array,
    x: jax.Array,
    weights: jax.Array | None,
    k: int,
    options: ExpertOptions,
) -> _Tile:
    tokens = x.shape[0]
    valid = (slots < tokens * k)[:, None]
    slot = jnp.minimum(slots, tokens * k - 1)
    token = slot // k
    combined = cotangent.ndim == 2
    out = cotangent[token] if combined else cotangent.reshape(tokens * k, -1)[slot]
    rows = jnp.where(valid, x[token].astype(jnp.float32), 0)
    ones = jnp.ones_like(rows, shape=(slots.shape[0], 1))
    factor = ones if weights is None else jnp.where(valid, weights.reshape(-1)[slot][:, None], 1)
    on_input = options.apply_router_weight_on_input
    return _Tile(
        slots=slots,
        tokens=jnp.where(valid[:, 0], token, tokens),
        x=rows,
        cotangent=jnp.where(valid, out.astype(jnp.float32), 0),
        on_input=factor if on_input else ones,
        on_output=factor if combined and not on_input else ones,
    )


def _tile_gradients(
    tile: _Tile, expert: ExpertWeights, options: ExpertOptions, wanted: Collection[str]
) -> Gradients:
    """What a tile of one expert (leaves without the E axis) adds to each gradient wanted."""
    w13 = _Dequantized(expert.w13)
    inputs = _fill(tile.x * tile.on_input, w13.values.shape[1])
    hidden = _dot(inputs, w13.values, (1, 1)) + w13.bias
    inner, pull_back = jax.vjp(
        functools.partial(activate, activation=options.activation),
        *_split_sides(hidden, expert.intermediate_size),
    )
    w2 = _Dequantized(expert.w2)
    outputs = _fill(tile.cotangent, w2.values.shape[0])
    weighted = outputs * tile.on_output
    to_inner = _dot(outputs, w2.values, (1, 0))[:, : inner.shape[1]]
    gate, up = pull_back(to_inner * tile.on_output)
    to_hidden = _join_sides(gate, up, hidden.shape[1])
    to_inputs = _dot(to_hidden, w13.values, (1, 0))[:, : tile.x.shape[1]]

    added: Gradients = {}
    if "x" in wanted:
        added["x"] = to_inputs * tile.on_input
    if "weights" in wanted and options.apply_router_weight_on_input:
        added["weights"] = (to_inputs * tile.x).sum(axis=-1)
    elif "weights" in wanted:  # the slot's output times its cotangent, by way of what is there already
        added["weights"] = (to_inner * inner).sum(axis=-1) + (outputs * w2.bias).sum(axis=-1)
    if "w13.bias" in wanted:
        added["w13.bias"] = to_hidden.sum(axis=0)
    if "w2.bias" in wanted:
        added["w2.bias"] = weighted.sum(axis=0)
    if "w13.scale" in wanted:
        added["w13.scale"] = w13.scale_gradient(_dot(to_hidden, inputs, (0, 0)))
    if "w2.scale" in wanted:
        products = _dot(weighted, _fill(inner, w2.values.shape[1]), (0, 0))
        added["w2.scale"] = w2.scale_gradient(products)
    return added


def experts_gradients(
    cotangent: jax.Array,
    x: jax.Array,
    weights: jax.Array | None,
    ids: jax.Array,
    experts: ExpertWeights,
    options: ExpertOptions,
    wanted: Collection[str],
) -> Gradients:
    """Gradients of the expert call.

    Args:
      cotangent: of the combined output, ``[T, H]``, or of the slots, ``[T, k, H]``.
      x, weights, ids, experts, options: the call's. ``weights`` may be None where slots are not weighted.
      wanted: of ``x``, ``weights``, ``w13.scale``, ``w13.bias``, ``w2.scale``, ``w2.bias``.

    Returns:
      float32 arrays of the operands' shapes.
    """
    k, num_experts = ids.shape[1], experts.num_experts
    shapes: dict[str, tuple[int, ...]] = {"x": x.shape, "weights": (ids.size,)}
    for side, linear in (("w13", experts.w13), ("w2", experts.w2)):
        shapes |= {f"{side}.scale": linear.scale.shape, f"{side}.bias": linear.bias.shape}
    # Made of x, so that they vary over the same axes of a mesh inside shard_map.
    gradients = {name: jnp.zeros_like(x, shape=shapes[name], dtype=jnp.float32) for name in wanted}
    if ids.size:
        height = tile_height(ids.size, num_experts, _TILE_ROWS)
        tiles = tile_slots(ids.reshape(-1), num_experts, height)

        def add_tile(number: Any, gradients: Gradients) -> Gradients:
            expert = tiles.expert[number]
            one = jax.tree.map(functools.partial(_take, index=expert), experts)
            tile = _gather(tiles.slots[number], cotangent, x, weights, k, options)
            added = _tile_gradients(tile, one, options, wanted)
            rows = {"x": tile.tokens, "weights": tile.slots}
            return {
                name: total.at[rows[name]].add(added[name], mode="drop")
                if name in rows
                else total.at[expert].add(added[name].reshape(total.shape[1:]))
                for name, total in gradients.items()
            }

        gradients = lax.fori_loop(0, tiles.used, add_tile, gradients)
    wrong = (ids < -1) | (ids >= num_experts)
    if "x" in wanted:
        gradients["x"] = jnp.where(wrong.any(axis=1, keepdims=True), jnp.nan, gradients["x"])
    if "weights" in wanted:
        gradients["weights"] = jnp.where(wrong, jnp.nan, gradients["weights"].reshape(ids.shape))
    return gradients


def combine_gradients(
    cotangent: jax.Array, slots: jax.Array, weights: jax.Array, wanted: Collection[str]
) -> Gradients:
    """Gradients of the combine with respect to ``slots`` and ``weights``."""
    rows = cotangent.astype(jnp.float32)[:, None]
    gradients = {}
    if "slots" in wanted:
        gradients["slots"] = rows * weights[..., None]
    if "weights" in wanted:
        gradients["weights"] = (rows * slots).sum(axis=-1)
    return gradients


def linear_gradients(
    cotangent: jax.Array, x: jax.Array, weights: LinearWeights, wanted: Collection[str]
) -> Gradients:
    """Gradients of the dense linear with respect to ``x``, ``scale`` and ``bias``.

    Chunks of output channels are dequantised one after another; the last one overlaps the one before it if
    they don't come out even, and then takes part with its new channels alone.
    """
    blocks, groups, _ = weights.codes.shape
    columns = groups * weights.group_width
    chunk = min(blocks, max(1, _CHUNK_WEIGHTS // (BLOCK_CHANNELS * columns)))
    out = _fill(cotangent.astype(jnp.float32), blocks * BLOCK_CHANNELS)
    rows = x.astype(jnp.float32)
    parts = {"x": x, "scale": weights.scale}
    zeros = {
        name: jnp.zeros_like(x, shape=parts[name].shape, dtype=jnp.float32)
        for name in wanted
        if name != "bias"
    }

    def add_chunk(number: Any, gradients: Gradients) -> Gradients:
        start = jnp.minimum(number * chunk, blocks - chunk)
        one = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, chunk, 0), weights)
        dequantized = _Dequantized(one)
        width = chunk * BLOCK_CHANNELS
        outputs = lax.dynamic_slice_in_dim(out, start * BLOCK_CHANNELS, width, 1)
        channel = start * BLOCK_CHANNELS + jnp.arange(width)
        outputs = jnp.where(channel >= number * width, outputs, 0)
        if "x" in gradients:
            product = _dot(outputs, dequantized.values, (1, 0))[:, : rows.shape[1]]
            gradients |= {"x": gradients["x"] + product}
        if "scale" in gradients:
            product = dequantized.scale_gradient(_dot(outputs, _fill(rows, columns), (0, 0)))
            before = lax.dynamic_slice_in_dim(gradients["scale"], start, chunk, 0)
            gradients |= {
                "scale": lax.dynamic_update_slice_in_dim(gradients["scale"], before + product, start, 0)
            }
        return gradients

    result = dict(lax.fori_loop(0, math.ceil(blocks / chunk), add_chunk, zeros)) if zeros else {}
    if "bias" in wanted:
        result["bias"] = out.sum(axis=0).reshape(weights.bias.shape)
    return result


def grouped_linear_gradients(
    cotangent: jax.Array, x: jax.Array, ids: jax.Array, weights: LinearWeights, wanted: Collection[str]
) -> Gradients:
    """Gradients of the grouped linear with respect to ``x``, ``scale`` and ``bias``: tile by tile, one
    matrix dequantised at a time.
    """
    total, stack = x.shape[0], weights.codes.shape[0]
    parts = {"x": x, "scale": weights.scale, "bias": weights.bias}
    zeros = {name: jnp.zeros_like(x, shape=parts[name].shape, dtype=jnp.float32) for name in wanted}
    if total == 0:
        return zeros
    tiles = tile_slots(ids, stack, tile_height(total, stack, _TILE_ROWS))

    def add_tile(number: Any, gradients: Gradients) -> Gradients:
        matrix, rows = tiles.expert[number], tiles.slots[number]
        valid = (rows < total)[:, None]
        row = jnp.minimum(rows, total - 1)
        dequantized = _Dequantized(jax.tree.map(lambda leaf: leaf[matrix], weights))
        out = jnp.where(valid, cotangent[row].astype(jnp.float32), 0)
        out = _fill(out, dequantized.values.shape[0])
        inputs = jnp.where(valid, x[row].astype(jnp.float32), 0)
        inputs = _fill(inputs, dequantized.values.shape[1])
        added: dict[str, Any] = {
            "x": lambda g: g.at[rows].set(
                _dot(out, dequantized.values, (1, 0))[:, : x.shape[1]], mode="drop"
            ),
            "scale": lambda g: g.at[matrix].add(dequantized.scale_gradient(_dot(out, inputs, (0, 0)))),
            "bias": lambda g: g.at[matrix].add(out.sum(0).reshape(g.shape[1:])),
        }
        return {name: added[name](gradient) for name, gradient in gradients.items()}

    gradients: Gradients = lax.fori_loop(0, tiles.used, add_tile, zeros)
    if "x" in wanted:
        wrong = (ids < -1) | (ids >= stack)
        gradients["x"] = jnp.where(wrong[:, None], jnp.nan, gradients["x"])
    return gradients
