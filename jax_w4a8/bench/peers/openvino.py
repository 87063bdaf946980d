"""OpenVINO on CPU: MoE blocks that its plugin fuses, and dense INT4 layers with dynamic INT8 activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.peers.base import Peer, even_groups, pairs, projections
from jax_w4a8.bench.work import Array, MoEWork, Round, Work
from jax_w4a8.quantization import CHANNELWISE, QuantizedTensor

_FUSED_PER_LAYER = 3  # GatherMatmul nodes: gate, up, down


class OpenVino(Peer):
    """One compiled model holds all layers; activations are quantised by groups as large as the weights'."""

    name = "openvino"
    summary = "OpenVINO INT4 MatMul and GatherMatmul, dynamic quantisation"
    modules = ("openvino",)
    distribution = "openvino"
    install = "pip install openvino"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        inputs = (
            (work.shape.hidden_size, work.shape.intermediate_size)
            if isinstance(work, MoEWork)
            else (work.shape.in_features,)  # type: ignore[attr-defined]
        )
        if not even_groups(inputs, work.group_size):
            return f"OpenVINO needs sizes that are multiples of the group size {work.group_size}"
        return None

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`.

        Raises:
          RuntimeError: the plugin didn't fuse the MoE blocks.
        """
        return _Loaded(work, layers, threads)

    def bytes_per_layer(self, work: Work) -> float:
        """It makes its own copy, and for a while more."""
        return 5.0 * work.layer_bytes


class _Loaded(Loaded):
    name = OpenVino.name

    def __init__(self, work: Work, layers: Sequence[Any], threads: int) -> None:
        import openvino

        self.num_layers = len(layers)
        self._is_moe = isinstance(work, MoEWork)
        self._constants: list[Array] = []  # shared with the model, not copied
        inputs, outputs = [], []
        for layer in layers:
            parameters, output = self._moe(work, layer) if self._is_moe else self._linear(layer)
            inputs += parameters
            outputs.append(output)
        group = 0 if work.group_size == CHANNELWISE else work.group_size
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        }
        model = openvino.Model(outputs, inputs, "layers")
        self._compiled: Any = openvino.Core().compile_model(model, "CPU", settings)
        self.variant = "GatherMatmul" if self._is_moe else "MatMul"
        if self._is_moe and self._fused() != _FUSED_PER_LAYER * len(layers):
            raise RuntimeError(f"OpenVINO fused {self._fused()} products of {len(layers)} MoE layers")

    def _fused(self) -> int:
        kinds = [op.get_rt_info()["layerType"] for op in self._compiled.get_runtime_model().get_ops()]
        return sum(
            "GatherMatmul" in str(kind.astype(str) if hasattr(kind, "astype") else kind) for kind in kinds
        )

    def _weight(self, weights: QuantizedTensor) -> Any:
        """INT4 codes, multiplied by their scales, as float32 ``[..., N, K]``."""
        import openvino
        from openvino import opset13 as op

        *lead, inputs = weights.codes.shape
        width = inputs if weights.group_size == CHANNELWISE else weights.group_size
        # Two's complement nibbles: our codes plus 8 with their highest bit turned.
        packed = (pairs(weights.codes) ^ np.uint8(0x88)).reshape(-1)
        self._constants.append(packed)
        shape = openvino.Shape([*lead, inputs // width, width])
        codes = op.constant(openvino.Tensor(packed, shape, openvino.Type.i4), shared_memory=True)
        scale = op.constant(np.asarray(weights.scale, np.float32).astype(np.float16)[..., None])
        product = op.multiply(op.convert(codes, "f16"), scale)
        whole = op.reshape(product, op.constant(np.array([*lead, inputs], np.int64)), False)
        return op.convert(whole, "f32")

    def _linear(self, layer: Any) -> tuple[list[Any], Any]:
        from openvino import opset13 as op

        (weights,) = projections(layer)
        x = op.parameter([-1, weights.codes.shape[-1]], np.float32)
        return [x], op.matmul(x, self._weight(weights), False, True)

    def _moe(self, work: Any, layer: Any) -> tuple[list[Any], Any]:
        """Every expert on every token, weighted: the pattern that the plugin turns into sparse products."""
        from openvino import opset13 as op
        from openvino.utils.node_factory import NodeFactory

        experts, hidden = work.shape.num_experts, work.shape.hidden_size
        w13, w2 = projections(layer)
        gate, up = (
            QuantizedTensor(codes, scale, w13.group_size)
            for codes, scale in zip(
                np.split(w13.codes, 2, axis=1), np.split(w13.scale, 2, axis=1), strict=True
            )
        )

        def integers(*values: int) -> Any:
            return op.constant(np.array(values, np.int64))

        zero, one = op.constant(np.int64(0)), op.constant(np.int64(1))
        x = op.parameter([-1, hidden], np.float32)
        ids = op.parameter([-1, work.shape.top_k], np.int32)
        weights = op.parameter([-1, work.shape.top_k], np.float32)
        tiled = op.reshape(op.tile(x, integers(experts, 1)), integers(experts, -1, hidden), False)
        # swish() would add a constant that the plugin's pattern doesn't know.
        gated = NodeFactory("opset4").create(
            "Swish", [op.matmul(tiled, self._weight(gate), False, True).output(0)], {}
        )
        inner = op.multiply(gated, op.matmul(tiled, self._weight(up), False, True))
        y = op.matmul(inner, self._weight(w2), False, True)
        tokens = op.gather(op.shape_of(ids, "i64"), integers(0), zero)
        y = op.reshape(y, op.concat([integers(experts, 1, -1, hidden)], 0), False)
        dense = op.broadcast(op.constant(np.zeros(1, np.float32)), op.concat([tokens, integers(experts)], 0))
        dense = op.transpose(op.scatter_elements_update(dense, ids, weights, one), integers(1, 0))
        dense = op.reshape(dense, op.concat([integers(experts, 1), tokens], 0), False)
        y = op.reduce_sum(op.multiply(y, op.unsqueeze(dense, op.constant(np.int64(3)))), zero, False)
        return [x, ids, weights], op.reshape(y, integers(-1, hidden), False)

    def _feed(self, inputs: Round) -> dict[int, Array]:
        if not self._is_moe:
            return dict.fromkeys(range(self.num_layers), inputs.x)
        feed: dict[int, Array] = {}
        for layer, (weights, ids) in enumerate(zip(inputs.weights, inputs.ids, strict=True)):
            feed |= {3 * layer: inputs.x, 3 * layer + 1: ids, 3 * layer + 2: weights}
        return feed

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        request = self._compiled.create_infer_request()
        feeds = [self._feed(part) for part in inputs.passes(self.num_layers)]
        request.infer(feeds[0], share_inputs=True, share_outputs=True)  # allocates

        def run() -> None:
            for feed in feeds:
                request.infer(feed, share_inputs=True, share_outputs=True)

        return run

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        feed = self._feed(inputs.passes(self.num_layers)[0])
        return np.array(self._compiled.create_infer_request().infer(feed)[0])

    def close(self) -> None:
        """As :meth:`Loaded.close`."""
        self._compiled = None
        self._constants.clear()
