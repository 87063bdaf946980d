"""A stored model in words: each module's shape, scheme, size and backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax_w4a8.checkpoint import StoredArray, StoredExperts, StoredLinear
from jax_w4a8.models.backends import ask_about, stored_weight_key
from jax_w4a8.models.config import DecoderConfig
from jax_w4a8.models.plan import DecoderPlan, MoEPlan
from jax_w4a8.oracle import W4A8Int8MoeBackend, resolve_backend


@dataclasses.dataclass(frozen=True)
class ModuleDescription:
    """One module; all attributes are text for a table.

    Attributes:
      name, shape, scheme: as the checkpoint has them.
      megabytes: size on disk.
      backend: which backend it runs on; ``-`` for modules in floating point.
    """

    name: str
    shape: str
    scheme: str
    megabytes: str
    backend: str


def describe_modules(
    config: DecoderConfig,
    plan: DecoderPlan,
    activation_scheme: str = "asymmetric",
    backend: str = "auto",
) -> Iterator[ModuleDescription]:
    """Every module of a stored model, the experts of a layer as one, in the order of the model.

    Raises:
      ValueError, NotImplementedError: no backend runs a module here as asked.
    """
    dense = W4A8Int8MoeBackend(resolve_backend(backend).name).name
    questions = {
        layer.mlp.experts.name: ask_about(config, layer.mlp, activation_scheme, backend)
        for layer in plan.layers
        if isinstance(layer.mlp, MoEPlan)
    }
    choices = {name: "-" if asked is None else asked.choose().name for name, asked in questions.items()}
    for module in plan.modules():
        if isinstance(module, StoredArray):
            yield _describe_float(module.name, module.shape, module.dtype_name, module.nbytes)
        elif isinstance(module, StoredExperts):
            yield _describe_experts(module, choices[module.name])
        elif module.weight is not None:
            weight = module.weight
            yield _describe_float(module.name, weight.shape, weight.dtype_name, module.nbytes)
        else:
            yield _describe_linear(module, dense)


def _describe_float(name: str, shape: tuple[int, ...], dtype: str, nbytes: int) -> ModuleDescription:
    return ModuleDescription(name, _shape(*shape), dtype.lower(), _megabytes(nbytes), "-")


def _describe_linear(module: StoredLinear, backend: str) -> ModuleDescription:
    shape = _shape(module.out_features, module.in_features)
    return ModuleDescription(module.name, shape, _scheme(module), _megabytes(module.nbytes), backend)


def _describe_experts(module: StoredExperts, backend: str) -> ModuleDescription:
    gate = module.gates[0]
    shape = f"{len(module)} experts of 3 x {_shape(gate.out_features, gate.in_features)}"
    return ModuleDescription(module.name, shape, _scheme(gate), _megabytes(module.nbytes), backend)


def _scheme(module: StoredLinear) -> str:
    if module.scheme is None:
        return "-"
    return f"{stored_weight_key(module.scheme, module.scale_dtype)}, {module.scheme.storage}"


def _shape(*sizes: int) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"
