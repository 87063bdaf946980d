"""ONNX Runtime on CPU: the contrib operators QMoE and MatMulNBits, INT4 weights met by INT8 activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.peers.base import Peer, even_groups, group_scales, pairs, projections
from jax_w4a8.bench.work import Array, MoEWork, Round, Work
from jax_w4a8.quantization import CHANNELWISE

#: ``accuracy_level`` that lets it quantise activations to INT8.
_INT8_ACTIVATIONS = 4
_DOMAIN = "com.microsoft"
#: Router logit of experts that aren't chosen.
_ABSENT = -60.0


class OnnxRuntime(Peer):
    """All layers in one session, so that one thread pool serves them. QMoE does softmax and top-k, too."""

    name = "onnxruntime"
    summary = "ONNX Runtime QMoE and MatMulNBits, accuracy level 4"
    modules = ("onnxruntime", "onnx")
    distribution = "onnxruntime"
    install = "pip install onnxruntime onnx"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if work.group_size == CHANNELWISE:
            return "ONNX Runtime dequantises channel-wise weights to float32, so it has no part in this"
        if work.group_size & (work.group_size - 1) or work.group_size < 16:
            return f"ONNX Runtime needs a group size that is a power of two from 16, got {work.group_size}"
        if not even_groups(_inputs(work), work.group_size):
            return f"ONNX Runtime needs sizes that are multiples of the group size {work.group_size}"
        return None

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`."""
        kind = _QMoE if isinstance(work, MoEWork) else _MatMulNBits
        return kind(work, layers, threads)

    def bytes_per_layer(self, work: Work) -> float:
        """It keeps what it was given beside what it made of it."""
        return 2.7 * work.layer_bytes


def _inputs(work: Work) -> tuple[int, ...]:
    if isinstance(work, MoEWork):
        return work.shape.hidden_size, work.shape.intermediate_size
    shape: Any = work.shape  # type: ignore[attr-defined]
    return (shape.in_features,)


class _Session(Loaded):
    """One node for each layer, all fed with the same x."""

    name = OnnxRuntime.name

    def __init__(self, work: Work, layers: Sequence[Any], threads: int) -> None:
        import onnxruntime

        self.num_layers = len(layers)
        self._work = work
        self._initializers: list[tuple[str, Any]] = []
        self._protos: list[Any] = []
        nodes = [self._node(index, layer) for index, layer in enumerate(layers)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.add_external_initializers(*map(list, zip(*self._initializers, strict=True)))
        self._session: Any = onnxruntime.InferenceSession(
            self._model(nodes), options, providers=["CPUExecutionProvider"]
        )

    def _node(self, index: int, layer: Any) -> Any:
        raise NotImplementedError

    def _value_infos(self) -> tuple[list[Any], list[Any]]:
        raise NotImplementedError

    def _feed(self, inputs: Round) -> dict[str, Array]:
        raise NotImplementedError

    def _initializer(self, name: str, value: Array) -> str:
        """Registers weights that the model refers to; they aren't copied into it."""
        import onnx
        import onnxruntime

        proto = onnx.TensorProto()
        proto.name = name
        proto.data_type = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        proto.dims.extend(value.shape)
        proto.data_location = onnx.TensorProto.EXTERNAL
        entry = proto.external_data.add()
        entry.key, entry.value = "location", f"memory_{name}"
        self._protos.append(proto)
        self._initializers.append(
            (name, onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)))
        )
        return name

    def _model(self, nodes: Sequence[Any]) -> bytes:
        from onnx import helper

        graph = helper.make_graph(nodes, "layers", *self._value_infos(), self._protos)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(_DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        serialized: bytes = model.SerializeToString()
        return serialized

    def prepare(self, inputs: Round) -> Callable[[], None]:
        """As :meth:`Loaded.prepare`."""
        feeds = [self._feed(part) for part in inputs.passes(self.num_layers)]

        def run() -> None:
            for feed in feeds:
                self._session.run(None, feed)

        return run

    def first_output(self, inputs: Round) -> Array:
        """As :meth:`Loaded.first_output`."""
        output: Array = self._session.run(None, self._feed(inputs.passes(self.num_layers)[0]))[0]
        return output

    def close(self) -> None:
        """As :meth:`Loaded.close`."""
        self._session = None
        self._initializers.clear()


class _QMoE(_Session):
    variant = "QMoE"

    def _node(self, index: int, layer: Any) -> Any:
        from onnx import helper

        assert isinstance(self._work, MoEWork)
        w13, w2 = projections(layer)
        group = self._work.group_size
        names = [
            self._initializer(f"w13_{index}", _interleaved(pairs(w13.codes))),
            self._initializer(f"s13_{index}", _interleaved(group_scales(w13, group))),
            self._initializer(f"w2_{index}", pairs(w2.codes)),
            self._initializer(f"s2_{index}", group_scales(w2, group)),
        ]
        return helper.make_node(
            "QMoE",
            ["x", f"router_{index}", names[0], names[1], "", names[2], names[3]],
            [f"y_{index}"],
            domain=_DOMAIN,
            k=self._work.shape.top_k,
            activation_type="swiglu",
            swiglu_fusion=1,
            activation_alpha=1.0,
            activation_beta=0.0,
            normalize_routing_weights=1,
            expert_weight_bits=4,
            block_size=group,
            accuracy_level=_INT8_ACTIVATIONS,
            weights_prepacked=0,
        )

    def _value_infos(self) -> tuple[list[Any], list[Any]]:
        from onnx import TensorProto, helper

        assert isinstance(self._work, MoEWork)
        shape = self._work.shape

        def info(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", width])

        numbers = range(self.num_layers)
        routers = [info(f"router_{i}", shape.num_experts) for i in numbers]
        return [info("x", shape.hidden_size), *routers], [info(f"y_{i}", shape.hidden_size) for i in numbers]

    def _feed(self, inputs: Round) -> dict[str, Array]:
        assert isinstance(self._work, MoEWork)
        experts = self._work.shape.num_experts
        routers = [_logits(w, i, experts) for w, i in zip(inputs.weights, inputs.ids, strict=True)]
        return {"x": inputs.x, **{f"router_{i}": logits for i, logits in enumerate(routers)}}


def _interleaved(values: Array) -> Array:
    """``[E, 2I, ...]``, gate channels first, to gate and up channels in turn."""
    gate, up = np.split(values, 2, axis=1)
    return np.stack([gate, up], axis=2).reshape(values.shape)


def _logits(weights: Array, ids: Array, experts: int) -> Array:
    """Router logits that give these experts and weights by softmax and top-k."""
    logits = np.full((len(ids), experts), _ABSENT, np.float32)
    chosen = np.log(np.maximum(weights, 1e-20))
    np.put_along_axis(logits, ids.astype(np.int64), chosen, axis=1)
    return logits


class _MatMulNBits(_Session):
    variant = "MatMulNBits"

    def _node(self, index: int, layer: Any) -> Any:
        from onnx import helper

        (weights,) = projections(layer)
        group = self._work.group_size
        out_features, in_features = weights.codes.shape
        codes = pairs(weights.codes).reshape(out_features, in_features // group, group // 2)
        names = [
            self._initializer(f"w_{index}", codes),
            self._initializer(f"s_{index}", group_scales(weights, group)),
        ]
        return helper.make_node(
            "MatMulNBits",
            ["x", *names],
            [f"y_{index}"],
            domain=_DOMAIN,
            K=in_features,
            N=out_features,
            bits=4,
            block_size=group,
            accuracy_level=_INT8_ACTIVATIONS,
        )

    def _value_infos(self) -> tuple[list[Any], list[Any]]:
        from onnx import TensorProto, helper

        shape: Any = self._work.shape  # type: ignore[attr-defined]

        def info(name: str, width: int) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", width])

        outputs = [info(f"y_{i}", shape.out_features) for i in range(self.num_layers)]
        return [info("x", shape.in_features)], outputs

    def _feed(self, inputs: Round) -> dict[str, Array]:
        return {"x": inputs.x}
