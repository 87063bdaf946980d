"""llama.cpp: one MoE layer as the graph that its models build, and a linear map, on ggml's CPU backend.

Compiled by GCC 12 on a machine with AMX, llama.cpp stops at its first prompt with an illegal instruction.
There, install it with ``CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
-DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON"``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.peers import ggml
from jax_w4a8.bench.peers.base import Peer, projections
from jax_w4a8.bench.peers.ggml_blocks import MULTIPLES, encode, row_bytes
from jax_w4a8.bench.work import Array, MoEWork, Round, Work
from jax_w4a8.quantization import QuantizedTensor

_WEIGHTS_USAGE = 1


class LlamaCpp(Peer):
    """Weights in Q4_0 or Q4_K, repacked for the instruction set as llama.cpp does by default, or not."""

    name = "llama.cpp"
    summary = "llama.cpp, Q4_0 and Q4_K, repacked and not"
    modules = ("llama_cpp",)
    distribution = "llama-cpp-python"
    install = "pip install llama-cpp-python (it compiles llama.cpp for this machine)"

    def __init__(self, kind: str, repacked: bool) -> None:
        self.kind = kind
        self.repacked = repacked

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        multiple = MULTIPLES[self.kind]
        if any(n % multiple for n in _input_sizes(work)):
            return f"{self.kind} needs inputs that are multiples of {multiple}"
        if work.group_size > 0 and work.group_size % 32:
            return f"{self.kind} has groups of 32, which don't divide {work.group_size}"
        return None

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`."""
        return _Loaded(self, work, layers, threads)

    def bytes_per_layer(self, work: Work) -> float:
        """Its own copy, and for one layer the forms in between."""
        return 1.15 * work.layer_bytes


def _input_sizes(work: Work) -> tuple[int, ...]:
    if isinstance(work, MoEWork):
        return work.shape.hidden_size, work.shape.intermediate_size
    return (work.shape.in_features,)  # type: ignore[attr-defined]


@dataclasses.dataclass
class _Graph:
    """A graph with its inputs and outputs; one for every number of tokens."""

    context: Any
    allocator: Any
    graph: Any
    x: Any
    ids: list[Any]
    weights: list[Any]
    outputs: list[Any]

    def free(self) -> None:
        g = ggml.library()
        g.ggml_gallocr_free(self.allocator)
        g.ggml_free(self.context)


class _Loaded(Loaded):
    name = LlamaCpp.name

    def __init__(self, peer: LlamaCpp, work: Work, layers: Sequence[Any], threads: int) -> None:
        g = self._g = ggml.library()
        self.variant = f"{peer.kind.upper()}{' repacked' if peer.repacked else ''}"
        self.num_layers = len(layers)
        self._work = work
        self._kind = peer.kind
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._backend = g.ggml_backend_cpu_init()
        g.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self._context = ggml.context(4 * len(layers) + 4)
        self._layers = [self._tensors() for _ in layers]
        self._buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(
            self._context, ggml.buffer_type(peer.repacked)
        )
        g.ggml_backend_buffer_set_usage(self._buffer, _WEIGHTS_USAGE)
        for tensors, layer in zip(self._layers, layers, strict=True):
            for tensor, weights in zip(tensors, _separate(layer), strict=True):
                ggml.write(tensor, encode(peer.kind, weights))

    def _tensors(self) -> list[Any]:
        kind = ggml.TYPES[self._kind]
        new_2d, new_3d = self._g.ggml_new_tensor_2d, self._g.ggml_new_tensor_3d
        if isinstance(self._work, MoEWork):
            shape = self._work.shape
            hidden, inner, experts = shape.hidden_size, shape.intermediate_size, shape.num_experts
            return [
                new_3d(self._context, kind, hidden, inner, experts),
                new_3d(self._context, kind, hidden, inner, experts),
                new_3d(self._context, kind, inner, hidden, experts),
            ]
        linear: Any = self._work.shape  # type: ignore[attr-defined]
        return [new_2d(self._context, kind, linear.in_features, linear.out_features)]

    def _graph(self, tokens: int, steps: int) -> _Graph:
        if (tokens, steps) not in self._graphs:
            for graph in self._graphs.values():
                graph.free()
            self._graphs = {(tokens, steps): self._build(tokens, steps)}
        return self._graphs[tokens, steps]

    def _build(self, tokens: int, steps: int) -> _Graph:
        g = self._g
        nodes = 64 * steps + 64
        context = ggml.context(2 * nodes, nodes)
        graph = g.ggml_new_graph_custom(context, nodes, False)
        x = g.ggml_new_tensor_2d(context, ggml.F32, _input_sizes(self._work)[0], tokens)
        g.ggml_set_input(x)
        ids: list[Any] = []
        weights: list[Any] = []
        outputs = []
        for step in range(steps):
            tensors = self._layers[step % self.num_layers]
            if isinstance(self._work, MoEWork):
                ids.append(g.ggml_new_tensor_2d(context, ggml.I32, self._work.shape.top_k, tokens))
                weights.append(g.ggml_new_tensor_3d(context, ggml.F32, 1, self._work.shape.top_k, tokens))
                g.ggml_set_input(ids[-1])
                g.ggml_set_input(weights[-1])
                output = self._moe(context, tensors, x, ids[-1], weights[-1], tokens)
            else:
                output = g.ggml_mul_mat(context, tensors[0], x)
            g.ggml_set_output(output)
            g.ggml_build_forward_expand(graph, output)
            outputs.append(output)
        allocator = g.ggml_gallocr_new(g.ggml_backend_cpu_buffer_type())
        if not g.ggml_gallocr_alloc_graph(allocator, graph):
            raise MemoryError(f"llama.cpp couldn't allocate a graph of {tokens} tokens")
        return _Graph(context, allocator, graph, x, ids, weights, outputs)

    def _moe(self, context: Any, tensors: list[Any], x: Any, ids: Any, weights: Any, tokens: int) -> Any:
        g = self._g
        assert isinstance(self._work, MoEWork)
        hidden, k = self._work.shape.hidden_size, self._work.shape.top_k
        gate, up, down = tensors
        rows = g.ggml_reshape_3d(context, x, hidden, 1, tokens)
        inner = g.ggml_swiglu_split(
            context,
            g.ggml_mul_mat_id(context, gate, rows, ids),
            g.ggml_mul_mat_id(context, up, rows, ids),
        )
        slots = g.ggml_mul(context, g.ggml_mul_mat_id(context, down, inner, ids), weights)
        total = None
        for slot in range(k):
            part = g.ggml_view_2d(context, slots, hidden, tokens, 4 * k * hidden, 4 * slot * hidden)
            total = part if total is None else g.ggml_add(context, total, part)
        return total

    def _fill(self, inputs: Round) -> _Graph:
        graph = self._graph(inputs.tokens, inputs.steps)
        ggml.write(graph.x, inputs.x)
        for tensor, values in zip(graph.ids, inputs.ids, strict=False):
            ggml.write(tensor, values)
        for tensor, values in zip(graph.weights, inputs.weights, strict=False):
            ggml.write(tensor, values)
        return graph

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        graph = self._fill(inputs)

        def run() -> None:
            self._g.ggml_backend_graph_compute(self._backend, graph.graph)

        return run

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        graph = self._fill(inputs)
        self._g.ggml_backend_graph_compute(self._backend, graph.graph)
        work: Any = self._work
        width = work.shape.hidden_size if isinstance(work, MoEWork) else work.shape.out_features
        return ggml.read(graph.outputs[0], (inputs.tokens, width))

    def close(self) -> None:
        """As :meth:`Loaded.close`."""
        for graph in self._graphs.values():
            graph.free()
        self._graphs.clear()
        self._g.ggml_backend_buffer_free(self._buffer)
        self._g.ggml_free(self._context)
        self._g.ggml_backend_free(self._backend)


def _separate(layer: Any) -> list[QuantizedTensor]:
    """Gate, up and down of an MoE layer, or the one matrix of a linear map."""
    found = projections(layer)
    if len(found) == 1:
        return list(found)
    w13, w2 = found
    halves = zip(np.split(w13.codes, 2, axis=1), np.split(w13.scale, 2, axis=1), strict=True)
    return [*(QuantizedTensor(codes, scale, w13.group_size) for codes, scale in halves), w2]


def layer_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of a matrix in llama.cpp's format."""
    return outputs * row_bytes(kind, inputs)
