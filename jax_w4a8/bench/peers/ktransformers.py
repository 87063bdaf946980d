"""kt-kernel, the CPU kernels of KTransformers: INT4 groups of 32, bfloat16 scales. Needs AVX-512 or AMX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_w4a8.bench.implementations import Loaded
from jax_w4a8.bench.peers.base import LoadedTorchLayers, Peer, pairs, projections
from jax_w4a8.bench.work import MoEWork, Round, Work

_GROUP = 32
_MOST_TOKENS = 1024


class KTransformers(Peer):
    """Its class for raw INT4 weights, called in the calling thread.

    Its pool binds a thread to each core and the caller spins beside it: with as many threads as cores, calls
    take multiples of a scheduler tick. One thread fewer than cores is what it can do.
    """

    name = "ktransformers"
    summary = "kt-kernel AMXInt4_KGroup_MOE"
    modules = ("torch", "kt_kernel")
    distribution = "kt-kernel"
    install = "pip install torch==2.13.0; pip install --no-deps kt-kernel"

    def refusal(self, work: Work, threads: int) -> str | None:
        """As :meth:`Implementation.refusal`."""
        if not isinstance(work, MoEWork):
            return "kt-kernel runs MoE layers alone"
        if work.group_size != _GROUP:
            return f"kt-kernel gives right results with groups of {_GROUP}, got {work.group_size}"
        return None

    def load(self, work: Work, layers: Sequence[Any], threads: int) -> Loaded:
        """As :meth:`Implementation.load`."""
        return _Loaded(work, layers, threads)

    def bytes_per_layer(self, work: Work) -> float:
        """Its own copy beside the one that it was given."""
        return 2.2 * work.layer_bytes


class _Loaded(LoadedTorchLayers):
    name = KTransformers.name
    variant = "RAWINT4"

    def __init__(self, work: Any, layers: Sequence[Any], threads: int) -> None:
        import kt_kernel  # noqa: F401  finds the extension for this machine
        import kt_kernel_ext
        import torch

        self._torch = torch
        self._top_k = work.shape.top_k
        self.num_layers = len(layers)
        pool = kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self._cpu = kt_kernel_ext.CPUInfer(pool)
        self._sources: list[Any] = []
        self._layers = [self._layer(kt_kernel_ext.moe, work, layer) for layer in layers]

    def _layer(self, extension: Any, work: Any, layer: Any) -> Any:
        torch, shape = self._torch, work.shape
        experts = shape.num_experts
        mask = torch.zeros(experts, dtype=torch.bool)
        config = extension.MOEConfig(
            experts, shape.top_k, shape.hidden_size, shape.intermediate_size, mask.data_ptr()
        )
        config.pool = self._cpu.backend_
        config.max_len = _MOST_TOKENS
        config.quant_config.bits, config.quant_config.group_size = 4, _GROUP
        config.quant_config.zero_point = False
        stored = [
            (torch.from_numpy(pairs(w.codes).copy()), torch.from_numpy(w.scale.astype(np.float32)).bfloat16())
            for w in projections(layer)
        ]
        identity = torch.arange(experts, dtype=torch.int64)
        self._sources += [mask, identity, stored]
        (c13, s13), (c2, s2) = stored
        inner = shape.intermediate_size

        def addresses(tensor: Any, row: int) -> list[list[int]]:
            return [[tensor[expert, row:].data_ptr() for expert in range(experts)]]

        config.gate_projs, config.gate_scales = addresses(c13, 0), addresses(s13, 0)
        config.up_projs, config.up_scales = addresses(c13, inner), addresses(s13, inner)
        config.down_projs, config.down_scales = addresses(c2, 0), addresses(s2, 0)
        moe = extension.AMXInt4_KGroup_MOE(config)
        self._cpu.submit(moe.load_weights_task(identity.data_ptr()))
        self._cpu.sync()
        return moe

    def calls(self, inputs: Round) -> tuple[Callable[[int], None], Any]:
        """As :meth:`LoadedTorchLayers.calls`."""
        torch = self._torch
        x = torch.from_numpy(inputs.x).bfloat16()
        out = torch.zeros_like(x)
        count = torch.tensor([inputs.tokens], dtype=torch.int32)
        routing = [
            (torch.from_numpy(i.astype(np.int64)), torch.from_numpy(w))
            for w, i in zip(inputs.weights, inputs.ids, strict=True)
        ]

        def call(step: int) -> None:
            ids, weights = routing[step]
            self._layers[step % self.num_layers].forward(
                count.data_ptr(),
                self._top_k,
                ids.data_ptr(),
                weights.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                False,
            )

        return call, out

    def close(self) -> None:
        """As :meth:`Loaded.close`."""
        self._layers.clear()
        self._sources.clear()
