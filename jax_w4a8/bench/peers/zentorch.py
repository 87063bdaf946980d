"""zentorch: AMD's extension of PyTorch, whose fused MoE op serves vLLM's CPU backend. Needs AVX-512."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.peers.base import LoadedTorchLayers, Peer, even_groups, projections
from jax_w4a8.bench.work import MoEWork, Round, Work
from jax_w4a8.quantization import CHANNELWISE


class ZenTorch(Peer):
    """``torch.ops.zentorch.zentorch_fused_moe`` on its W4A8 weights, bfloat16 in and out."""

    name = "zentorch"
    summary = "zentorch fused MoE, W4A8"
    modules = ("torch", "zentorch")
    distribution = "zentorch"
    install = "pip install torch==2.13.0 deprecated; pip install --no-deps zentorch==2.13.0.1"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if not isinstance(work, MoEWork):
            return "zentorch runs MoE layers alone here"
        if work.group_size == CHANNELWISE:
            return "zentorch's fused MoE takes groups of inputs"
        if not even_groups((work.shape.hidden_size, work.shape.intermediate_size), work.group_size):
            return f"zentorch needs sizes that are multiples of the group size {work.group_size}"
        return None

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`."""
        return _Loaded(layers, threads)

    def bytes_per_layer(self, work: Work) -> float:
        """What was seen to stay, most of it what repacking takes."""
        return 8.0 * work.layer_bytes


class _Loaded(LoadedTorchLayers):
    name = ZenTorch.name
    variant = "W4A8"

    def __init__(self, layers: Sequence[Any], threads: int) -> None:
        import torch
        import zentorch  # noqa: F401  registers its operators

        torch.set_num_threads(threads)
        self._torch = torch
        self._layers = [[self._repack(w) for w in projections(layer)] for layer in layers]
        self.num_layers = len(layers)

    def _repack(self, weights: Any) -> tuple[Any, Any]:
        torch = self._torch
        repack = torch.ops.zentorch.zentorch_woq_repack_weight.default
        codes = torch.stack([repack(torch.from_numpy(one.copy())) for one in weights.codes])
        scale = torch.from_numpy(weights.scale.astype(np.float32)).bfloat16()
        return codes, scale.transpose(1, 2).contiguous()

    def calls(self, inputs: Round) -> tuple[Callable[[int], None], Any]:
        """As :meth:`LoadedTorchLayers.calls`."""
        torch = self._torch
        op = torch.ops.zentorch.zentorch_fused_moe
        x = torch.from_numpy(inputs.x).bfloat16()
        routing = [
            (torch.from_numpy(w), torch.from_numpy(i))
            for w, i in zip(inputs.weights, inputs.ids, strict=True)
        ]
        out = torch.empty_like(x)

        def call(step: int) -> None:
            (w13, s13), (w2, s2) = self._layers[step % self.num_layers]
            weights, ids = routing[step]
            op(out, x, w13, w2, None, None, weights, ids, False, "silu", s13, s2)

        return call, out

    def close(self) -> None:
        """As :meth:`Loaded.close`."""
        self._layers.clear()
