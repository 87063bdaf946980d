"""From a checkpoint directory to a model: a plan by headers first, then module by module into place."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_w4a8.checkpoint import (
    Checkpoint,
    FloatExperts,
    StoredArray,
    StoredExperts,
    StoredLinear,
    to_device,
)
from jax_w4a8.checkpoint.tensors import read_json
from jax_w4a8.experts.base import check_activation_scheme
from jax_w4a8.models.attention import Attention
from jax_w4a8.models.backends import check_backend
from jax_w4a8.models.config import DecoderConfig, LatentAttentionConfig
from jax_w4a8.models.decoder import Decoder, DecoderLayer
from jax_w4a8.models.families import find_family
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.latent_attention import LATENT_NORM_EPSILON, LatentAttention, LatentQuery, LatentUp
from jax_w4a8.models.layers import Embedding, Linear, QuantizedOptions, RMSNorm
from jax_w4a8.models.mlp import DenseMLP, MoE, SharedExpert
from jax_w4a8.models.packed_cache import (
    CachedModules,
    CacheEntry,
    MissingModuleError,
    ModuleStore,
    PackedCache,
    as_packed_cache,
)
from jax_w4a8.models.plan import (
    AttentionPlan,
    DecoderPlan,
    DensePlan,
    LatentAttentionPlan,
    LayerPlan,
    MoEPlan,
    SharedPlan,
    plan_decoder,
)
from jax_w4a8.models.progress import Progress, loading_progress
from jax_w4a8.models.quantized_head import quantize_linear
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.sharding import ExpertSharding, place_experts, replicate
from jax_w4a8.weights import ExpertWeights

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"


def read_plan(
    path: str | Path, *, weight_only: str | None = None, allow_float: bool = False
) -> tuple[DecoderConfig, DecoderPlan]:
    """A checkpoint's configuration and modules, checked as far as headers go.

    Args:
      path: a directory with ``config.json`` and ``.safetensors`` files, or a ``.gguf`` file.
      weight_only, allow_float: as for :func:`load_model`.

    Raises:
      CheckpointError: it is damaged, of another scheme than W4A8, or of an unknown family. The message names
        the file, tensor or field.
    """
    checkpoint = Checkpoint(path, weight_only=weight_only, allow_float=allow_float)
    family = find_family(checkpoint.config.get("model_type"), checkpoint.where)
    fields = Fields(checkpoint.config, checkpoint.where)
    _check_counts(fields, len(checkpoint.files.headers))
    config = family.configure(fields)
    config = dataclasses.replace(config, eos_token_ids=_eos_token_ids(checkpoint, config))
    return config, plan_decoder(checkpoint, config, family.names)


def load_model(
    path: str | Path,
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
    progress: bool | Callable[[int, int], None] | None = None,
    packed_cache: bool | str | os.PathLike[str] | PackedCache | None = None,
    *,
    sharding: ExpertSharding | None = None,
    weight_only: str | None = None,
    allow_float: bool = False,
    quantize_head: bool = False,
) -> Decoder:
    """Loads a W4A8 checkpoint, in compressed-tensors form or GGUF's Q4_0.

    Experts are read and packed one at a time, into buffers that JAX takes over without a copy on CPU. Beside
    the packed weights, memory holds two experts as they are stored.

    Args:
      path: a directory with ``config.json`` and ``.safetensors`` files, as Hugging Face tools write it, or a
        ``.gguf`` file.
      activation_scheme: ``asymmetric`` (less error) or ``symmetric`` (what the checkpoint's writer emulates).
      backend: ``auto``, ``cpu_int4`` (native) or ``xla`` (pure JAX).
      progress: True for a progress bar on standard error (if ``rich`` is installed), False for none, None for
        one on terminals; or a function of bytes read and bytes in all.
      packed_cache: a directory, or True for one in the user's cache directory: the packed weights are kept
        there, and the next load of the unchanged checkpoint maps them into memory. See :class:`PackedCache`.
      weight_only: ``w4a8`` takes INT4 weights that were stored for floating point activations (W4A16) and
        runs them with INT8 activations, which their writer didn't test; None refuses them.
      allow_float: take a checkpoint that isn't quantised at all, and run it in floating point.
      quantize_head: quantise an output head in floating point to INT4 as it is loaded (groups of 32), and run
        it with INT8 activations. A token then reads a quarter of its bytes. With tied embeddings the head
        is a quantised copy.
      sharding: spreads the experts, and batches if it says so, over a mesh, which may span processes
        (:class:`jax_w4a8.sharding.ExpertSharding`). A process reads the experts of its own devices alone;
        everything else is on every device.

    Returns:
      A model; ``model(token_ids)`` gives logits, ``model.generate(token_ids)`` a continuation.

    Raises:
      CheckpointError: as :func:`read_plan`; also a code out of range, NaN or infinity.
      ValueError: an unknown activation scheme or backend, the backend asked for can't run here, the experts
        can't be spread as asked, or both ``packed_cache`` and ``sharding``.
      TypeError: ``packed_cache`` is none of those named.
    """
    check_activation_scheme(activation_scheme)
    cache = as_packed_cache(packed_cache)
    if sharding is not None:
        if cache is not None:
            raise ValueError("packed_cache holds whole layers, and can't be used together with sharding")
        sharding = _on_auto_axes(sharding)
    config, plan = read_plan(path, weight_only=weight_only, allow_float=allow_float)
    check_backend(config, plan, activation_scheme, backend, sharding)
    entry = None if cache is None else CacheEntry(cache, plan)
    with loading_progress(progress, plan.nbytes) as advance:
        options = QuantizedOptions(activation_scheme, backend, sharding=sharding)
        return _build(config, plan, options, advance, entry, quantize_head)


def build_decoder(
    config: DecoderConfig,
    plan: DecoderPlan,
    options: QuantizedOptions,
    progress: Progress,
    quantize_head: bool = False,
) -> Decoder:
    """Reads the modules of a plan and puts them together, as :func:`load_model` does.

    Args:
      config, plan: as :func:`read_plan` gives them.
      options: how its quantised layers run.
      progress: called with the bytes of each module as it was read.
      quantize_head: as in :func:`load_model`.
    """
    return _build(config, plan, options, progress, None, quantize_head)


def _build(
    config: DecoderConfig,
    plan: DecoderPlan,
    options: QuantizedOptions,
    advance: Progress,
    entry: CacheEntry | None,
    quantize_head: bool,
) -> Decoder:
    cached = None if entry is None else entry.read()
    if entry is not None and cached is not None:
        try:
            return _Builder(config, options, CachedModules(advance, cached)).decoder(plan, quantize_head)
        except MissingModuleError as error:
            entry.refuse(str(error))
    modules = ModuleStore(advance, remember=entry is not None)
    decoder = _Builder(config, options, modules).decoder(plan, quantize_head)
    if entry is not None:
        entry.write(modules.made)
    return decoder


def _on_auto_axes(sharding: ExpertSharding) -> ExpertSharding:
    """The same on Auto mesh axes: outside the expert calls a model leaves the partitioning to XLA."""
    mesh = sharding.mesh
    if not isinstance(mesh, Mesh):
        raise TypeError(f"sharding.mesh must be a Mesh with devices, got {type(mesh).__name__}")
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return dataclasses.replace(sharding, mesh=Mesh(mesh.devices, mesh.axis_names, axis_types=kinds))


def _check_counts(fields: Fields, tensors: int) -> None:
    """Nothing is made for each layer before there can be as many: every layer has a tensor."""
    for name in ("num_hidden_layers", "num_nextn_predict_layers"):
        if fields.integer(name, 0, minimum=0) > tensors:
            raise fields.error(name, f"at most the number of tensors in the files, {tensors}")


def _eos_token_ids(checkpoint: Checkpoint, config: DecoderConfig) -> tuple[int, ...]:
    """From ``generation_config.json`` if it is there and says so, else from ``config.json``."""
    file = checkpoint.directory / GENERATION_CONFIG_FILE
    if not file.exists():
        return config.eos_token_ids
    return Fields(read_json(file), str(file)).integers("eos_token_id") or config.eos_token_ids


class _Builder:
    """Reads stored modules and makes them modules of a model."""

    def __init__(self, config: DecoderConfig, options: QuantizedOptions, modules: ModuleStore) -> None:
        self._config = config
        self._options = options
        self._modules = modules

    def decoder(self, plan: DecoderPlan, quantize_head: bool) -> Decoder:
        embedding = Embedding(self._read(plan.embedding))
        layers = [self._layer(layer) for layer in plan.layers]
        head = None if plan.head is None else self._linear(plan.head)
        if quantize_head:
            head = head or Linear(embedding.table.get_value(), None, self._options)
            head = quantize_linear(head, self._options)
        return Decoder(
            self._config,
            self._options,
            embedding,
            layers,
            self._norm(plan.final_norm),
            head,
        )

    def _layer(self, plan: LayerPlan) -> DecoderLayer:
        mlp, attention = plan.mlp, plan.attention
        return DecoderLayer(
            self._norm(plan.attention_norm),
            self._latent_attention(attention)
            if isinstance(attention, LatentAttentionPlan)
            else self._attention(attention),
            self._norm(plan.mlp_norm),
            self._mixture(mlp) if isinstance(mlp, MoEPlan) else self._dense(mlp),
        )

    def _attention(self, plan: AttentionPlan) -> Attention:
        return Attention(
            plan.config,
            query=self._linear(plan.query),
            key=self._linear(plan.key),
            value=self._linear(plan.value),
            output=self._linear(plan.output),
            query_norm=None if plan.query_norm is None else self._norm(plan.query_norm),
            key_norm=None if plan.key_norm is None else self._norm(plan.key_norm),
            sinks=None if plan.sinks is None else self._read(plan.sinks),
        )

    def _latent_attention(self, plan: LatentAttentionPlan) -> LatentAttention:
        query = plan.query
        return LatentAttention(
            plan.config,
            query=self._linear(query)
            if isinstance(query, StoredLinear)
            else LatentQuery(self._linear(query.down), self._latent_norm(query.norm), self._linear(query.up)),
            latent_down=self._linear(plan.latent_down),
            latent_norm=self._latent_norm(plan.latent_norm),
            latent_up=self._latent_up(plan.latent_up, plan.config),
            output=self._linear(plan.output),
        )

    def _latent_up(self, stored: StoredLinear, config: LatentAttentionConfig) -> LatentUp:
        def read(advance: Progress) -> np.ndarray[Any, Any]:
            value = stored.read()
            advance(stored.nbytes)
            return np.asarray(value.dequantize()) if isinstance(value, QuantizedTensor) else value

        weight = self._put(self._modules.get(stored, read)).reshape(config.num_heads, -1, config.rank)
        scheme = None if stored.scheme is None else self._options.activation_scheme
        return LatentUp(weight, config.nope_dim, scheme)

    def _dense(self, plan: DensePlan) -> DenseMLP:
        return DenseMLP(
            self._config.activation,
            gate=self._linear(plan.gate),
            up=self._linear(plan.up),
            down=self._linear(plan.down),
        )

    def _mixture(self, plan: MoEPlan) -> MoE:
        router = self._linear(plan.router)
        bias = None if plan.correction_bias is None else self._correction_bias(plan.correction_bias)
        return MoE(
            self._config.activation,
            plan.config.routing,
            router,
            self._experts(plan.experts),
            self._options,
            correction_bias=bias,
            shared=None if plan.shared is None else self._shared(plan.shared),
        )

    def _experts(self, stored: StoredExperts) -> ExpertWeights | FloatExperts:
        sharding = self._options.sharding
        if stored.scheme is None:  # a cache holds packed weights alone
            return self._put(stored.read_float(self._modules.advance))
        if sharding is None:
            return to_device(self._modules.get(stored, stored.read))

        def read(start: int, stop: int) -> ExpertWeights:
            return stored.run(start, stop).read(self._modules.advance)

        return place_experts(read, len(stored), sharding)

    def _shared(self, plan: SharedPlan) -> SharedExpert:
        gate = None if plan.gate is None else self._linear(plan.gate)
        return SharedExpert(self._dense(plan.mlp), gate)

    def _correction_bias(self, stored: StoredArray) -> jax.Array:
        bias = self._read(stored)
        if not bias.any():
            logger.warning("%r is all zeros: whoever wrote the checkpoint may have lost it", stored.name)
        return bias

    def _put(self, tree: Any) -> Any:
        sharding = self._options.sharding
        return to_device(tree) if sharding is None else replicate(tree, sharding)

    def _norm(self, stored: StoredArray) -> RMSNorm:
        return RMSNorm(self._read(stored), self._config.norm_epsilon)

    def _latent_norm(self, stored: StoredArray) -> RMSNorm:
        return RMSNorm(self._read(stored), LATENT_NORM_EPSILON)

    def _linear(self, stored: StoredLinear) -> Linear:
        weight, bias = self._put(self._modules.get(stored, stored.read_whole))
        return Linear(weight, bias, self._options)

    def _read(self, stored: StoredArray) -> jax.Array:
        array: jax.Array = self._put(self._modules.get(stored, stored.read_whole))
        return array
