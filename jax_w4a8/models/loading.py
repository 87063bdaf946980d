"""From a checkpoint directory to a model: a plan by headers first, then module by module into place."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jax_w4a8.checkpoint import (
    Checkpoint,
    StoredArray,
    StoredExperts,
    StoredLinear,
    to_device,
)
from jax_w4a8.checkpoint.tensors import read_json
from jax_w4a8.experts.base import check_activation_scheme
from jax_w4a8.models.attention import Attention
from jax_w4a8.models.backends import check_backend
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.decoder import Decoder, DecoderLayer
from jax_w4a8.models.families import find_family
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.layers import Embedding, Linear, QuantizedOptions, RMSNorm
from jax_w4a8.models.mlp import DenseMLP, MoE
from jax_w4a8.models.plan import (
    AttentionPlan,
    DecoderPlan,
    DensePlan,
    LayerPlan,
    MoEPlan,
    plan_decoder,
)
from jax_w4a8.models.progress import Progress, loading_progress
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.sharding import ExpertSharding, place_experts, replicate
from jax_w4a8.weights import ExpertWeights, pack_linear

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


def read_plan(path: str | Path) -> tuple[DecoderConfig, DecoderPlan]:
    """A checkpoint's configuration and modules, checked as far as headers go.

    Args:
      path: a directory with ``config.json`` and ``.safetensors`` files.

    Raises:
      CheckpointError: it is damaged, of another scheme than W4A8, or of an unknown family. The message names
        the file, tensor or field.
    """
    checkpoint = Checkpoint(path)
    where = str(checkpoint.directory / "config.json")
    family = find_family(checkpoint.config.get("model_type"), where)
    config = family.configure(Fields(checkpoint.config, where))
    config = dataclasses.replace(config, eos_token_ids=_eos_token_ids(checkpoint, config))
    return config, plan_decoder(checkpoint, config, family.names)


def load_model(
    path: str | Path,
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
    progress: bool | Callable[[int, int], None] | None = None,
    sharding: ExpertSharding | None = None,
) -> Decoder:
    """Loads a compressed-tensors W4A8 checkpoint.

    Experts are read and packed one at a time, into buffers that JAX takes over without a copy on CPU.

    Args:
      path: a directory with ``config.json`` and ``.safetensors`` files, as Hugging Face tools write it.
      activation_scheme: ``asymmetric`` (less error) or ``symmetric`` (what the checkpoint's writer emulates).
      backend: ``auto``, ``cpu_int4`` (native) or ``xla`` (pure JAX).
      progress: True for a progress bar on standard error (if ``rich`` is installed), False for none, None for
        one on terminals; or a function of bytes read and bytes in all.
      sharding: spreads the experts, and batches if it says so, over a mesh, which may span processes
        (:class:`jax_w4a8.sharding.ExpertSharding`). A process reads the experts of its own devices alone;
        everything else is on every device.

    Returns:
      A model; ``model(token_ids)`` gives logits, ``model.generate(token_ids)`` a continuation.

    Raises:
      CheckpointError: as :func:`read_plan`; also a code out of range, NaN or infinity.
      ValueError: an unknown activation scheme or backend, the backend asked for can't run here, or the
        experts can't be spread as asked.
    """
    check_activation_scheme(activation_scheme)
    if sharding is not None:
        sharding = _on_auto_axes(sharding)
    config, plan = read_plan(path)
    check_backend(config, plan, activation_scheme, backend, sharding)
    with loading_progress(progress, plan.nbytes) as advance:
        builder = _Builder(config, QuantizedOptions(activation_scheme, backend, sharding), advance)
        return builder.decoder(plan)


def _on_auto_axes(sharding: ExpertSharding) -> ExpertSharding:
    """The same on Auto mesh axes: outside the expert calls a model leaves the partitioning to XLA."""
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh):
        raise TypeError(f"sharding.mesh must be a Mesh with devices, got {type(mesh).__name__}")
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return dataclasses.replace(sharding, mesh=Mesh(mesh.devices, mesh.axis_names, axis_types=kinds))


def _eos_token_ids(checkpoint: Checkpoint, config: DecoderConfig) -> tuple[int, ...]:
    """From ``generation_config.json`` if it is there and says so, else from ``config.json``."""
    file = checkpoint.directory / GENERATION_CONFIG_FILE
    if not file.exists():
        return config.eos_token_ids
    return Fields(read_json(file), str(file)).integers("eos_token_id") or config.eos_token_ids


class _Builder:
    """Reads stored modules and makes them modules of a model."""

    def __init__(self, config: DecoderConfig, options: QuantizedOptions, advance: Progress) -> None:
        self._config = config
        self._options = options
        self._advance = advance

    def decoder(self, plan: DecoderPlan) -> Decoder:
        embedding = Embedding(self._read(plan.embedding))
        layers = [self._layer(layer) for layer in plan.layers]
        head = None if plan.head is None else self._linear(plan.head)
        return Decoder(
            self._config,
            self._options,
            embedding,
            layers,
            self._norm(plan.final_norm),
            head,
        )

    def _layer(self, plan: LayerPlan) -> DecoderLayer:
        mlp = plan.mlp
        return DecoderLayer(
            self._norm(plan.attention_norm),
            self._attention(plan.attention),
            self._norm(plan.mlp_norm),
            self._mixture(mlp) if isinstance(mlp, MoEPlan) else self._dense(mlp),
        )

    def _attention(self, plan: AttentionPlan) -> Attention:
        return Attention(
            self._config,
            query=self._linear(plan.query),
            key=self._linear(plan.key),
            value=self._linear(plan.value),
            output=self._linear(plan.output),
            query_norm=None if plan.query_norm is None else self._norm(plan.query_norm),
            key_norm=None if plan.key_norm is None else self._norm(plan.key_norm),
        )

    def _dense(self, plan: DensePlan) -> DenseMLP:
        return DenseMLP(
            self._config.activation,
            gate=self._linear(plan.gate),
            up=self._linear(plan.up),
            down=self._linear(plan.down),
        )

    def _mixture(self, plan: MoEPlan) -> MoE:
        router = self._linear(plan.router)
        experts = self._experts(plan.experts)
        return MoE(self._config.activation, plan.config.routing, router, experts, self._options)

    def _experts(self, stored: StoredExperts) -> ExpertWeights:
        sharding = self._options.sharding
        if sharding is None:
            experts: ExpertWeights = to_device(stored.read(self._advance))
            return experts

        def read(start: int, stop: int) -> ExpertWeights:
            return stored.run(start, stop).read(self._advance)

        return place_experts(read, len(stored), sharding)

    def _put(self, tree: Any) -> Any:
        sharding = self._options.sharding
        return to_device(tree) if sharding is None else replicate(tree, sharding)

    def _norm(self, stored: StoredArray) -> RMSNorm:
        return RMSNorm(self._read(stored), self._config.norm_epsilon)

    def _linear(self, stored: StoredLinear) -> Linear:
        bias = None if stored.bias is None else stored.bias.read()
        value = stored.read()
        self._advance(stored.nbytes)
        if isinstance(value, QuantizedTensor):
            return Linear(self._put(pack_linear(value, bias)), None, self._options)
        return Linear(self._put(value), self._put(bias), self._options)

    def _read(self, stored: StoredArray) -> jax.Array:
        values = stored.read()
        self._advance(stored.nbytes)
        array: jax.Array = self._put(values)
        return array
