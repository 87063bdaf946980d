"""Ways to run the layer in pure JAX: what people write first, and the best that was found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_w4a8 import ffi
from jax_w4a8.bench.implementations import Apply, Implementation, JaxLoaded, Loaded, apply_ours
from jax_w4a8.bench.work import Array, MoEWork, Round, Work, round_of
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.weights import ExpertWeights, LinearWeights, unpack_experts, unpack_linear

#: Rows of a block worth trying; compiled and timed anew for every number of tokens, so only a few.
_ROWS = (8, 16, 64)
#: A batch's room for rows is rounded up to this, so that similar loads share a program.
_CAPACITY_MULTIPLE = 16


class _PureJax(Implementation):
    """Runs on XLA's own thread pool, whose size is fixed when the process starts."""

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if threads != ffi.num_threads():
            own = ffi.num_threads()
            return f"pure JAX uses XLA's pool of {own} threads: start the process with NPROC={threads}"
        return None


class Xla(_PureJax):
    """This package's pure-JAX backend, exact to the numeric contract."""

    name = "xla"
    summary = "this package's pure-JAX backend, the reference for exactness"

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`."""
        return JaxLoaded(self.name, lambda x, w, i, layer: apply_ours(x, w, i, layer, "xla"), layers)

    def bytes_per_layer(self, work: Work) -> float:
        """It runs on our layers."""
        return 0.0


def _float_matrices(layer: ExpertWeights) -> tuple[jax.Array, jax.Array]:
    """Dequantised float32 ``[E, H, 2I]`` and ``[E, I, H]``, gate first."""

    def dequantize(layer: ExpertWeights) -> tuple[jax.Array, jax.Array]:
        w13, w2, *_ = unpack_experts(layer)
        first, second = (jnp.swapaxes(w.dequantize(), -1, -2) for w in (w13, w2))
        return first, second

    return jax.block_until_ready(jax.jit(dequantize)(layer))


def _split_act(h: jax.Array) -> jax.Array:
    gate, up = jnp.split(h, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _ragged_dot_layer(x: jax.Array, weights: jax.Array, ids: jax.Array, matrices: Any) -> jax.Array:
    """Rows sorted by expert, ``jax.lax.ragged_dot``, rows put back."""
    w13, w2 = matrices
    tokens, k = ids.shape
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=w13.shape[0]).astype(jnp.int32)
    y = lax.ragged_dot(_split_act(lax.ragged_dot(x[order // k], w13, sizes)), w2, sizes)
    slots = jnp.zeros_like(y).at[order].set(y).reshape(tokens, k, -1)
    return jnp.einsum("tkh,tk->th", slots, weights)


class RaggedDot(_PureJax):
    """What people write first."""

    name = "ragged_dot"
    holds_all = False
    summary = "jax.lax.ragged_dot on weights dequantised to float32 beforehand, one layer"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if not isinstance(work, MoEWork):
            return "ragged_dot is for MoE layers"
        return super().refusal(work, threads)

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`, the first layer alone."""
        return JaxLoaded(self.name, _ragged_dot_layer, [_float_matrices(layers[0])], "float32")

    def bytes_per_layer(self, work: Work) -> float:
        """Weights, and the expanded rows and transposed weights that XLA makes of them."""
        return 16.0 * work.layer_bytes


def _quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), 1e-20) / 127
    return jnp.round(x / scale).astype(jnp.int8), scale


#: int8 ``[E, N, K]`` with a float32 scale ``[E, N]``.
_Int8 = tuple[jax.Array, jax.Array]


def _int8_matrices(layer: ExpertWeights) -> tuple[_Int8, _Int8]:
    """int8 with one scale per output channel: groups of INT4 fit in almost without loss."""

    def quantize(w: QuantizedTensor) -> _Int8:
        values = w.dequantize()
        scale = jnp.max(jnp.abs(values), axis=-1) / 127
        return jnp.round(values / scale[..., None]).astype(jnp.int8), scale

    w13, w2, *_ = jax.jit(unpack_experts)(layer)
    return jax.block_until_ready((jax.jit(quantize)(w13), jax.jit(quantize)(w2)))


def _int8_product(x: jax.Array, weight: _Int8) -> jax.Array:
    """float32 ``[..., rows, K]`` by weights ``[..., N, K]`` to ``[..., rows, N]``, on INT8 activations."""
    codes, scale = weight
    q, row_scale = _quantize_rows(x)
    batch = tuple(range(x.ndim - 2))
    dimensions = ((x.ndim - 1,), (x.ndim - 1,)), (batch, batch)
    sums = lax.dot_general(q, codes, dimensions, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * row_scale * scale[..., None, :]


def _experts(x: jax.Array, matrices: tuple[_Int8, _Int8]) -> jax.Array:
    return _int8_product(_split_act(_int8_product(x, matrices[0])), matrices[1])


@dataclasses.dataclass(frozen=True)
class _Sorted:
    """Assignments sorted by expert: slots in that order, their experts, and each one's place in its run."""

    order: jax.Array
    expert: jax.Array
    place: jax.Array
    counts: jax.Array


def _sort(ids: jax.Array, experts: int) -> _Sorted:
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=experts)
    place = jnp.arange(flat.size) - (jnp.cumsum(counts) - counts)[flat[order]]
    return _Sorted(order, flat[order], place, counts)


def _combine(rows: jax.Array, padded: jax.Array, order: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums the rows at places ``padded``, which belong to the slots ``order``, by their weights."""
    places = jnp.zeros(weights.size, jnp.int32).at[order].set(padded.astype(jnp.int32))
    return jnp.einsum("tkh,tk->th", rows[places].reshape(*weights.shape, -1), weights)


def _by_blocks(rows: int) -> Apply:
    """Blocks of ``rows`` rows of one expert; a loop over those in use slices each one's matrices out."""

    def apply(x: jax.Array, weights: jax.Array, ids: jax.Array, matrices: tuple[_Int8, _Int8]) -> jax.Array:
        experts = matrices[0][0].shape[0]
        slots = ids.size
        by_expert = _sort(ids, experts)
        blocks = -(-by_expert.counts // rows)
        ends = jnp.cumsum(blocks)
        padded = (ends - blocks)[by_expert.expert] * rows + by_expert.place
        most_blocks = slots // rows + min(experts, slots)
        slot_of = jnp.full(most_blocks * rows, slots).at[padded].set(by_expert.order)

        def body(block: jax.Array, out: jax.Array) -> jax.Array:
            expert = jnp.searchsorted(ends, block, side="right")
            chosen = lax.dynamic_slice_in_dim(slot_of, block * rows, rows)
            x_block = jnp.take(x, chosen // ids.shape[1], axis=0, mode="fill", fill_value=0)
            own = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), matrices)
            return lax.dynamic_update_slice(out, _experts(x_block, own), (block * rows, 0))

        out = lax.fori_loop(0, ends[-1], body, jnp.zeros((most_blocks * rows, x.shape[1]), jnp.float32))
        return _combine(out, padded, by_expert.order, weights)

    return apply


def _by_capacity(capacity: int) -> Apply:
    """All experts at once, as a batch of products, each with room for ``capacity`` rows."""

    def apply(x: jax.Array, weights: jax.Array, ids: jax.Array, matrices: tuple[_Int8, _Int8]) -> jax.Array:
        experts = matrices[0][0].shape[0]
        by_expert = _sort(ids, experts)
        tokens = by_expert.order // ids.shape[1]
        rows = jnp.zeros((experts, capacity, x.shape[1])).at[by_expert.expert, by_expert.place].set(x[tokens])
        out = _experts(rows, matrices).reshape(experts * capacity, -1)
        return _combine(out, by_expert.expert * capacity + by_expert.place, by_expert.order, weights)

    return apply


class _Capacity(Loaded):
    """Knows the greatest load beforehand, which a program can't: kind to the baseline."""

    name = "scan"

    def __init__(self, matrices: Any) -> None:
        self.num_layers = 1
        self._matrices = matrices
        self._programs: dict[int, JaxLoaded] = {}

    def _program(self, inputs: Round) -> JaxLoaded:
        load = int(np.bincount(inputs.ids[0].reshape(-1)).max())
        capacity = -(-load // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE
        if capacity not in self._programs:
            self._programs[capacity] = JaxLoaded(self.name, _by_capacity(capacity), [self._matrices])
        return self._programs[capacity]

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`; compiles outside of what is timed."""
        run = self._program(inputs).prepare(inputs)
        run()
        return run

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        return self._program(inputs).first_output(inputs)


class _Tuned(Loaded):
    """Tries its candidates on the first inputs of each size, and keeps to the fastest."""

    name = "scan"

    def __init__(self, candidates: Callable[[Round], dict[str, Loaded]]) -> None:
        self.num_layers = 1
        self._candidates = candidates
        self._chosen: dict[tuple[int, ...], tuple[str, Loaded]] = {}

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        return self._choose(inputs).prepare(inputs)

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        return self._choose(inputs).first_output(inputs)

    def _choose(self, inputs: Round) -> Loaded:
        size = inputs.ids[0].shape
        if size not in self._chosen:
            inputs = round_of(inputs, [0])
            found = self._candidates(inputs)
            self._chosen[size] = min(found.items(), key=lambda item: _seconds(item[1].prepare(inputs)))
        self.variant, chosen = self._chosen[size]
        return chosen


def _seconds(run: Callable[[], None]) -> float:
    """The shorter of two runs, after one that compiles."""
    run()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class Scan(_PureJax):
    """The best pure-JAX path found, whatever it is for a number of tokens.

    Weights are unpacked beforehand to int8 with one scale per channel, which INT8 activations meet: XLA's
    int8 products are faster than its bfloat16 and float32 ones here. Assignments are sorted by expert. Either
    a loop takes blocks of rows and slices their expert's matrices out, or all experts are one batch of
    products with room for the greatest load. The fastest of them is found by trying, and named.
    """

    name = "scan"
    holds_all = False
    summary = "the best pure-JAX path found: sorted rows, int8 weights, looped blocks or a batch; one layer"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if not isinstance(work, MoEWork):
            return "scan is for MoE layers"
        return super().refusal(work, threads)

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`, the first layer alone."""
        matrices = _int8_matrices(layers[0])

        def candidates(inputs: Round) -> dict[str, Loaded]:
            slots = inputs.ids[0].size
            found: dict[str, Loaded] = {
                f"int8, blocks of {rows}": JaxLoaded(self.name, _by_blocks(rows), [matrices])
                for rows in _ROWS
                if rows <= slots or rows == _ROWS[0]
            }
            if slots >= matrices[0][0].shape[0]:
                found["int8, batch"] = _Capacity(matrices)
            return found

        return _Tuned(candidates)

    def bytes_per_layer(self, work: Work) -> float:
        """int8 matrices, and float32 ones while they are made."""
        return 11.0 * work.layer_bytes


class DenseBf16(_PureJax):
    """The linear map with bfloat16 weights."""

    name = "dot_bf16"
    summary = "jnp.dot on weights dequantised to bfloat16 beforehand, for --linear"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if isinstance(work, MoEWork):
            return "dot_bf16 is for linear maps"
        return super().refusal(work, threads)

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`."""

        def dequantize(layer: LinearWeights) -> jax.Array:
            return unpack_linear(layer)[0].dequantize().astype(jnp.bfloat16).T

        convert = jax.jit(dequantize)
        matrices = [convert(layer) for layer in layers]

        def apply(x: jax.Array, weights: jax.Array, ids: jax.Array, matrix: jax.Array) -> jax.Array:
            return jnp.dot(x.astype(jnp.bfloat16), matrix, preferred_element_type=jnp.float32)

        return JaxLoaded(self.name, apply, matrices)

    def bytes_per_layer(self, work: Work) -> float:
        """bfloat16."""
        return 4.0 * work.layer_bytes


BASELINES: dict[str, Implementation] = {one.name: one for one in (Xla(), RaggedDot(), Scan(), DenseBf16())}
