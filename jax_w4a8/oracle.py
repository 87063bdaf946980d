"""Chooses the backend of a layer from the platform and the quantisation scheme, and says why."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections.abc import Sequence

import jax

from jax_w4a8.experts.base import Backend, MoEConfig
from jax_w4a8.experts.cpu_int4 import CPUExpertsInt4
from jax_w4a8.experts.xla import XLAExperts
from jax_w4a8.quantization import QuantKey

__all__ = [
    "BackendVerdict",
    "MoEConfig",
    "QuantKey",
    "Verdicts",
    "W4A8Int8MoeBackend",
    "backend_class",
    "explain",
    "map_w4a8_int8_backend",
    "priority_backends",
    "resolve_backend",
    "select_w4a8_int8_moe_backend",
]

logger = logging.getLogger("jax_w4a8")


class W4A8Int8MoeBackend(enum.Enum):
    """The backends that W4A8 INT8 layers can run on."""

    CPU_INT4 = "cpu_int4"  # native kernels: INT4 weights stay packed, INT8 dot products
    XLA = "xla"  # pure JAX: any platform, the reference


_PRIORITIES: dict[str, tuple[W4A8Int8MoeBackend, ...]] = {
    "cpu": (W4A8Int8MoeBackend.CPU_INT4, W4A8Int8MoeBackend.XLA),
}


@dataclasses.dataclass(frozen=True)
class BackendVerdict:
    """A backend's answer about one layer; ``reason`` is None exactly when it is ``supported``."""

    backend: W4A8Int8MoeBackend
    supported: bool
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.backend.name}: {'yes' if self.supported else f'no, {self.reason}'}"


class Verdicts(tuple[BackendVerdict, ...]):
    """Backends in order of preference; prints one a line."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def backend_class(backend: W4A8Int8MoeBackend) -> type[Backend]:
    """The class behind a name."""
    classes: dict[W4A8Int8MoeBackend, type[Backend]] = {
        W4A8Int8MoeBackend.CPU_INT4: CPUExpertsInt4,
        W4A8Int8MoeBackend.XLA: XLAExperts,
    }
    return classes[backend]


def priority_backends(platform: str) -> tuple[W4A8Int8MoeBackend, ...]:
    """Backends that can run on a JAX platform, the preferred one first."""
    return _PRIORITIES.get(platform, (W4A8Int8MoeBackend.XLA,))


def map_w4a8_int8_backend(
    name: str | W4A8Int8MoeBackend, argument: str = "moe_backend"
) -> W4A8Int8MoeBackend | None:
    """What a user's name for a backend means, in any case; None for ``auto``.

    Raises:
      ValueError: there is no such name; the message names ``argument`` and lists those there are.
    """
    if isinstance(name, W4A8Int8MoeBackend):
        return name
    known: dict[str, W4A8Int8MoeBackend | None] = {"auto": None}
    known.update((backend.value, backend) for backend in W4A8Int8MoeBackend)
    if not isinstance(name, str) or name.lower() not in known:
        raise ValueError(f"{argument} must be one of {list(known)}, got {name!r}")
    return known[name.lower()]


def _current_platform() -> str:
    """Where computations go unless told otherwise: ``jax.default_device`` included."""
    device = getattr(jax.config, "jax_default_device", None)
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else str(device.platform)


def _not_listed(platform: str) -> str:
    names = [backend.name for backend in priority_backends(platform)]
    return f"it does not run on platform {platform!r}, whose backends are {names}"


def _judge(
    backend: W4A8Int8MoeBackend,
    config: MoEConfig,
    weight_key: QuantKey,
    activation_key: QuantKey | None,
) -> BackendVerdict:
    """``config.platform`` is set."""
    platform = str(config.platform)
    if backend not in priority_backends(platform):
        return BackendVerdict(backend, False, _not_listed(platform))
    supported, reason = backend_class(backend).is_supported_config(config, weight_key, activation_key)
    return BackendVerdict(backend, supported, None if supported else reason)


def _resolved(config: MoEConfig, weight_key: QuantKey, activation_key: QuantKey | None) -> MoEConfig:
    """The config with its platform filled in; TypeError when an argument isn't what it must be."""
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be a MoEConfig, got {type(config).__name__}")
    if not isinstance(weight_key, QuantKey):
        raise TypeError(f"weight_key must be a QuantKey, got {type(weight_key).__name__}")
    if activation_key is not None and not isinstance(activation_key, QuantKey):
        raise TypeError(f"activation_key must be a QuantKey or None, got {type(activation_key).__name__}")
    return dataclasses.replace(config, platform=config.platform or _current_platform())


def select_w4a8_int8_moe_backend(
    config: MoEConfig, weight_key: QuantKey, activation_key: QuantKey | None = None
) -> tuple[W4A8Int8MoeBackend, type[Backend]]:
    """Chooses the backend that runs a MoE layer.

    ``config.moe_backend="auto"`` takes the first backend of the platform's priority list that
    supports the layer. The choice is logged once, at INFO on the logger ``jax_w4a8``; see
    :func:`explain` for all answers. The interface is shaped like vLLM's oracle ``w4a8_int8``.

    Args:
      config: the layer.
      weight_key: scheme of the weights, such as ``ExpertWeights.key()``.
      activation_key: scheme of the activations as a checkpoint declares it, if it does.

    Returns:
      The backend and its class.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: ``config.moe_backend`` is unknown, or can't run the layer here (with the reason).
      NotImplementedError: the choice was automatic and no backend is left; every reason is given.
    """
    config = _resolved(config, weight_key, activation_key)
    requested = map_w4a8_int8_backend(config.moe_backend)
    if requested is not None:
        verdict = _judge(requested, config, weight_key, activation_key)
        if not verdict.supported:
            raise ValueError(f"moe_backend={requested.value!r} can't run this layer: {verdict.reason}")
        _log_choice(requested, (requested,), ())
        return requested, backend_class(requested)

    candidates = priority_backends(str(config.platform))
    refused: list[BackendVerdict] = []
    for backend in candidates:
        verdict = _judge(backend, config, weight_key, activation_key)
        if verdict.supported:
            _log_choice(backend, candidates, refused)
            return backend, backend_class(backend)
        refused.append(verdict)
    raise NotImplementedError(
        f"no W4A8 INT8 backend runs this layer on platform {config.platform!r}: "
        + "; ".join(map(str, refused))
    )


def explain(config: MoEConfig, weight_key: QuantKey, activation_key: QuantKey | None = None) -> Verdicts:
    """Every backend's answer about a layer: the platform's in order of preference, then the others.

    ``print(explain(...))`` shows a line per backend. ``config.moe_backend`` makes no difference.
    The arguments are those of :func:`select_w4a8_int8_moe_backend`.

    Raises:
      TypeError: an argument has the wrong type.
    """
    config = _resolved(config, weight_key, activation_key)
    listed = priority_backends(str(config.platform))
    rest = [backend for backend in W4A8Int8MoeBackend if backend not in listed]
    return Verdicts(_judge(backend, config, weight_key, activation_key) for backend in (*listed, *rest))


def resolve_backend(name: str | W4A8Int8MoeBackend = "auto", platform: str | None = None) -> type[Backend]:
    """The class that runs here, by the platform alone: cheap enough to ask on every trace.

    Args:
      name: ``auto``, ``cpu_int4``, ``xla`` in any case, or the enum's member.
      platform: a JAX platform name; None for the one that computations go to by default.

    Raises:
      ValueError: the name is unknown, or that backend can't run on the platform (with the reason).
      NotImplementedError: the choice was automatic and no backend is left; every reason is given.
    """
    requested = map_w4a8_int8_backend(name, "backend")
    platform = platform or _current_platform()
    candidates = priority_backends(platform)
    if requested is not None:
        experts_class = backend_class(requested)
        if requested in candidates:
            reason = experts_class.unavailable_reason(platform)
        else:
            reason = _not_listed(platform)
        if reason is not None:
            raise ValueError(f"backend={requested.value!r} can't run here: {reason}")
        _log_choice(requested, (requested,), ())
        return experts_class

    refused: list[BackendVerdict] = []
    for backend in candidates:
        experts_class = backend_class(backend)
        reason = experts_class.unavailable_reason(platform)
        if reason is None:
            _log_choice(backend, candidates, refused)
            return experts_class
        refused.append(BackendVerdict(backend, False, reason))
    raise NotImplementedError(
        f"no W4A8 INT8 backend runs on platform {platform!r}: " + "; ".join(map(str, refused))
    )


_logged: set[tuple[W4A8Int8MoeBackend, tuple[BackendVerdict, ...]]] = set()
_logged_lock = threading.Lock()


def _log_choice(
    chosen: W4A8Int8MoeBackend,
    candidates: Sequence[W4A8Int8MoeBackend],
    refused: Sequence[BackendVerdict],
) -> None:
    """Logs each pair of a choice and the refusals before it once."""
    if not logger.isEnabledFor(logging.INFO):
        return
    key = (chosen, tuple(refused))
    with _logged_lock:
        if key in _logged:
            return
        _logged.add(key)
    because = "".join(f"; {verdict}" for verdict in refused)
    names = [backend.name for backend in candidates]
    logger.info("W4A8 INT8 layers run on backend %s out of %s%s", chosen.name, names, because)
