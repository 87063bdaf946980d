"""Single layers out of a checkpoint directory, packed, for models of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jax_w4a8.blocks import MoEWeights
from jax_w4a8.buffers import to_device
from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.experts import StoredExperts
from jax_w4a8.checkpoint.reader import Checkpoint
from jax_w4a8.checkpoint.stored import StoredLinear
from jax_w4a8.checkpoint.tensors import first_names
from jax_w4a8.quantization import CODES_PER_WORD
from jax_w4a8.weights import ExpertWeights, LinearWeights, pack_linear


@dataclasses.dataclass(frozen=True)
class MoENames:
    """What the parts of an MoE module are called below its own name; Qwen's and DeepSeek's by default.

    Attributes:
      router: the router.
      experts: one expert, ``{expert}`` for its id.
      gate, up, down: an expert's projections.
      correction_bias: a tensor below the router's name; taken where it is stored.
      shared: shared experts, taken where they are stored: the first of these names.
      shared_gate: their gate, taken where it is stored.
    """

    router: str = "gate"
    experts: str = "experts.{expert}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    correction_bias: str = "e_score_correction_bias"
    shared: tuple[str, ...] = ("shared_expert", "shared_experts")
    shared_gate: str = "shared_expert_gate"


def read_linear(path: str | Path, name: str) -> LinearWeights:
    """The packed weights of one quantised linear map of a checkpoint, its bias included.

    Args:
      path: a compressed-tensors W4A8 directory.
      name: the module's name, such as ``model.layers.0.self_attn.q_proj``.

    Raises:
      CheckpointError: the directory is damaged or of another scheme, or has no such quantised module.
    """
    stored = _linear(Checkpoint(path), name)
    bias = None if stored.bias is None else stored.bias.read()
    packed: LinearWeights = to_device(pack_linear(stored.read_quantized(), bias))
    return packed


def read_moe(path: str | Path, name: str, names: MoENames | None = None) -> MoEWeights:
    """Everything that one MoE layer of a checkpoint has learnt: router, experts, shared experts.

    How its experts are chosen stands in ``config.json``, in terms that differ between families; give a
    :class:`jax_w4a8.Routing` to the module that the weights go to.

    Args:
      path: a compressed-tensors W4A8 directory.
      name: the module's name, such as ``model.layers.0.mlp``.
      names: what its parts are called.

    Raises:
      CheckpointError: the directory is damaged or of another scheme, or a part is missing.
    """
    names = names or MoENames()
    checkpoint = Checkpoint(path)
    router = f"{name}.{names.router}"
    experts = _experts(checkpoint, name, names)
    num_experts, hidden = experts.num_experts, experts.hidden_size
    bias, correction = f"{router}.bias", f"{router}.{names.correction_bias}"
    gate = f"{name}.{names.shared_gate}.weight"
    return MoEWeights(
        router=_read(checkpoint, f"{router}.weight", (num_experts, hidden)).T,
        experts=experts,
        router_bias=_read_if_there(checkpoint, bias, (num_experts,)),
        correction_bias=_read_if_there(checkpoint, correction, (num_experts,)),
        shared=_shared(checkpoint, name, names),
        shared_gate=_read(checkpoint, gate, (1, hidden))[0] if gate in checkpoint else None,
    )


def _linear(checkpoint: Checkpoint, name: str) -> StoredLinear:
    if name not in checkpoint.files.modules:
        near = [module for module in checkpoint.files.modules if module.endswith(name.rpartition(".")[2])]
        raise CheckpointError(
            f"{checkpoint.directory} has no module {name!r}; of that kind it has {first_names(near)}"
        )
    scheme = checkpoint.quantization.scheme_for(name)
    if scheme is None:
        raise CheckpointError(f"{checkpoint.directory}: module {name!r} is in floating point, not INT4")
    packed = scheme.storage == "pack-quantized"
    tensor = f"{name}.weight_packed" if packed else f"{name}.weight"
    scale = f"{name}.weight_scale"
    for needed in (tensor, scale):
        if needed not in checkpoint:
            raise CheckpointError(f"{checkpoint.directory}: tensor {needed!r} is missing")
    rows, columns = checkpoint.files.headers[tensor].shape
    if packed:
        columns = int(checkpoint.files.read(f"{name}.weight_shape")[1])
        if -(-columns // CODES_PER_WORD) != checkpoint.files.headers[tensor].shape[1]:
            raise CheckpointError(f"{checkpoint.directory}: {tensor!r} and its weight_shape don't fit")
    return checkpoint.linear(name, rows, columns, bias=f"{name}.bias" in checkpoint)


def _experts(checkpoint: Checkpoint, name: str, names: MoENames) -> ExpertWeights:
    projections: list[tuple[StoredLinear, ...]] = []
    while True:
        expert = f"{name}.{names.experts.format(expert=len(projections))}"
        if not any(module.startswith(f"{expert}.") for module in checkpoint.files.modules):
            break
        parts = (names.gate, names.up, names.down)
        projections.append(tuple(_linear(checkpoint, f"{expert}.{part}") for part in parts))
    if not projections:
        raise CheckpointError(f"{checkpoint.directory} has no experts {expert!r}")
    gates, ups, downs = zip(*projections, strict=True)
    packed: ExpertWeights = to_device(StoredExperts(f"{name}.experts", gates, ups, downs).read())
    return packed


def _shared(checkpoint: Checkpoint, name: str, names: MoENames) -> ExpertWeights | None:
    for shared in names.shared:
        module = f"{name}.{shared}"
        if f"{module}.{names.gate}" in checkpoint.files.modules:
            return _single_expert(checkpoint, module, names)
    return None


def _single_expert(checkpoint: Checkpoint, module: str, names: MoENames) -> ExpertWeights:
    parts = [(_linear(checkpoint, f"{module}.{part}"),) for part in (names.gate, names.up, names.down)]
    packed: ExpertWeights = to_device(StoredExperts(module, *parts).read())
    return packed


def _read(checkpoint: Checkpoint, tensor: str, shape: tuple[int, ...]) -> Any:
    return jax.device_put(checkpoint.array(tensor, shape).read())


def _read_if_there(checkpoint: Checkpoint, tensor: str, shape: tuple[int, ...]) -> Any:
    return _read(checkpoint, tensor, shape) if tensor in checkpoint else None
