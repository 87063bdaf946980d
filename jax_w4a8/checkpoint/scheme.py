"""What ``quantization_config`` of a compressed-tensors checkpoint says, as far as it is W4A8.

Field names, defaults and matching rules are those of compressed-tensors (``QuantizationConfig``,
``QuantizationArgs``). Exactly one family of schemes is understood: INT4 weights, symmetric, static, with one
scale per group or per output channel, and INT8 activations quantised per token when the model runs. INT4
weights stored for floating point activations are taken for the same only when asked by name. All else is
refused by the name of the field and the value found there.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any, Literal

from jax_w4a8.checkpoint.errors import CheckpointError, shortened
from jax_w4a8.checkpoint.patterns import check_pattern
from jax_w4a8.quantization import CHANNELWISE, GROUP_MULTIPLE

logger = logging.getLogger(__name__)

#: One code per byte, eight codes per 32-bit word, or GGUF's blocks of 32 codes.
Storage = Literal["int-quantized", "pack-quantized", "Q4_0"]
STORAGES: tuple[str, ...] = ("int-quantized", "pack-quantized")
#: What may be done with weights that were stored for floating point activations.
WEIGHT_ONLY = ("w4a8",)
#: Says that each group names its own.
_MIXED = "mixed-precision"

#: Defaults of compressed-tensors' QuantizationArgs, for fields that a file leaves out.
_ARGS_DEFAULTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": False,
    "strategy": None,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
}
#: Fields that say how scales were found or written, which the scales themselves show.
_ARGS_IRRELEVANT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}
_GROUP_FIELDS = {"targets", "weights", "input_activations", "output_activations", "format"}
_CONFIG_FIELDS = {
    "quant_method",
    "config_groups",
    "format",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "quantization_status",
    "global_compression_ratio",
    "version",
}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the modules of one config group are quantised and stored.

    Attributes:
      storage: ``int-quantized``, ``pack-quantized`` or ``Q4_0``.
      group_size: inputs per scale, -1 for channel-wise.
      inputs: input width that a channel-wise group size of K pins every module to, else None.
      symmetric_activations: what the checkpoint declares. Either kind runs with either activation scheme.
      weight_only: the checkpoint was made for activations in floating point.
    """

    storage: Storage
    group_size: int
    inputs: int | None = None
    symmetric_activations: bool = True
    weight_only: bool = False

    def check_inputs(self, module: str, in_features: int) -> None:
        """Raises CheckpointError if a channel-wise ``group_size`` was given that isn't the module's width."""
        if self.inputs not in (None, in_features):
            raise CheckpointError(
                f"module {module!r}: group_size {self.inputs} with strategy 'channel' must be null, -1, 0 or "
                f"the input width {in_features}"
            )


@dataclasses.dataclass(frozen=True)
class _Group:
    targets: tuple[str, ...]
    scheme: Scheme


def _matches_name(name: str, patterns: tuple[str, ...]) -> bool:
    return name in patterns


def _matches_regex(name: str, patterns: tuple[str, ...]) -> bool:
    return any(p.startswith("re:") and re.match(p[3:], name) is not None for p in patterns)


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Which modules are quantised, and how.

    Attributes:
      groups: in the order of the file.
      ignore: names, regular expressions (``re:``) and class names of modules left in floating point.
    """

    groups: tuple[_Group, ...]
    ignore: tuple[str, ...]

    def scheme_for(self, module: str, class_name: str = "Linear") -> Scheme | None:
        """The scheme of a module, or None if it stays in floating point.

        An exact name goes before a regular expression, that before a class name; among equals the first group
        of the file wins. ``ignore`` goes before all groups.
        """
        if self.ignores_itself(module, class_name):
            return None
        for matches, subject in (
            (_matches_name, module),
            (_matches_regex, module),
            (_matches_name, class_name),
        ):
            for group in self.groups:
                if matches(subject, group.targets):
                    return group.scheme
        return None

    def ignores_parent(self, module: str) -> bool:
        """Whether ``ignore`` lists, by its exact name, a module that ``module`` is part of."""
        parts = module.split(".")
        return any(".".join(parts[:n]) in self.ignore for n in range(1, len(parts)))

    def ignores_itself(self, module: str, class_name: str = "Linear") -> bool:
        """Whether ``ignore`` lists a module: by name, expression or class."""
        named = _matches_name(module, self.ignore) or _matches_regex(module, self.ignore)
        return named or _matches_name(class_name, self.ignore)

    def ignores(self, module: str) -> bool:
        """Whether ``ignore`` lists a module or one that it is part of."""
        return self.ignores_itself(module) or self.ignores_parent(module)


def check_weight_only(weight_only: str | None) -> None:
    """Raises ValueError unless ``weight_only`` is None or a way to run such weights."""
    if weight_only is not None and weight_only not in WEIGHT_ONLY:
        raise ValueError(f"weight_only must be None or one of {list(WEIGHT_ONLY)}, got {weight_only!r}")


def parse_quantization_config(
    raw: Any, where: str = "quantization_config", *, weight_only: str | None = None
) -> QuantizationConfig:
    """Reads the ``quantization_config`` object of a ``config.json``.

    Args:
      raw: the parsed JSON value.
      where: how messages call it.
      weight_only: ``w4a8`` takes groups without ``input_activations`` (W4A16) as W4A8; None refuses them.

    Raises:
      CheckpointError: anything but W4A8, naming the field, what was expected and what was found.
    """
    config = _mapping(raw, where)
    _expect(config.get("quant_method"), ("compressed-tensors",), f"{where}.quant_method")
    _check_extras(config, where)
    groups = _mapping(config.get("config_groups"), f"{where}.config_groups")
    if not groups:
        raise CheckpointError(f"{where}.config_groups is empty: nothing in this model is quantised")
    default = config.get("format")
    _expect(default, (*STORAGES, _MIXED, None), f"{where}.format")
    return QuantizationConfig(
        groups=tuple(
            _parse_group(group, default, f"{where}.config_groups.{name}", f"{where}.format", weight_only)
            for name, group in groups.items()
        ),
        ignore=_patterns(config.get("ignore") or [], f"{where}.ignore"),
    )


def _check_extras(config: Mapping[str, Any], where: str) -> None:
    """Refuses what changes weights, and notes what doesn't."""
    if config.get("kv_cache_scheme") is not None:
        logger.warning("%s.kv_cache_scheme is ignored: the KV cache stays in floating point", where)
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise CheckpointError(
            f"{where}.sparsity_config must be empty or of format 'dense', got {shortened(sparsity)}"
        )
    transform = config.get("transform_config")
    if transform and not (isinstance(transform, Mapping) and transform == {"config_groups": {}}):
        raise CheckpointError(f"{where}.transform_config must be empty, got {shortened(transform)}")
    for field in sorted(set(config) - _CONFIG_FIELDS):
        logger.warning("%s.%s is unknown and ignored", where, field)


def _parse_group(
    raw: Any, default_storage: Any, where: str, default_where: str, weight_only: str | None
) -> _Group:
    group = _mapping(raw, where)
    _refuse_unknown(group, _GROUP_FIELDS, where)
    _expect(group.get("output_activations"), (None,), f"{where}.output_activations")
    own = group.get("format")
    storage = own if own is not None else default_storage
    _expect(storage, STORAGES, f"{where}.format" if own is not None else default_where)
    targets = _patterns(group.get("targets"), f"{where}.targets")
    activations = group.get("input_activations")
    as_asked = activations is None and weight_only == "w4a8"
    symmetric = as_asked or _parse_activations(activations, f"{where}.input_activations")
    size, inputs = _parse_weights(group.get("weights"), f"{where}.weights")
    return _Group(targets, Scheme(storage, size, inputs, symmetric, weight_only=as_asked))


def _arguments(raw: Any, where: str) -> dict[str, Any]:
    given = _mapping(raw, where)
    _refuse_unknown(given, _ARGS_DEFAULTS.keys() | _ARGS_IRRELEVANT, where)
    return {**_ARGS_DEFAULTS, **given}


def _parse_weights(raw: Any, where: str) -> tuple[int, int | None]:
    """Group size (-1 channel-wise) and the input width that a channel-wise size spells out."""
    if raw is None:
        raise CheckpointError(f"{where} must describe INT4 weights, got null (activations only)")
    args = _arguments(raw, where)
    _expect(args["num_bits"], (4,), f"{where}.num_bits")
    _expect(args["type"], ("int",), f"{where}.type")
    _expect(args["symmetric"], (True,), f"{where}.symmetric")
    _expect(args["dynamic"], (False, None), f"{where}.dynamic")
    _expect(args["strategy"], ("group", "channel"), f"{where}.strategy")
    _expect(args["block_structure"], (None,), f"{where}.block_structure")
    order = args["actorder"]
    _expect(
        order.lower() if isinstance(order, str) else order,
        (None, False, "static", "weight"),
        f"{where}.actorder",
    )
    return _group_size(args["strategy"], args["group_size"], f"{where}.group_size")


def _group_size(strategy: str, size: Any, where: str) -> tuple[int, int | None]:
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise CheckpointError(f"{where} must be an integer or null, got {_spell(size)}")
    if strategy == "channel":
        if size in (None, CHANNELWISE, 0):
            return CHANNELWISE, None
        if size > 0:
            return CHANNELWISE, size
        raise CheckpointError(
            f"{where} with strategy 'channel' must be null, -1, 0 or the input width, got {size}"
        )
    if size is None or size <= 0 or size % GROUP_MULTIPLE:
        raise CheckpointError(
            f"{where} with strategy 'group' must be a positive multiple of {GROUP_MULTIPLE}, "
            f"got {_spell(size)}"
        )
    return size, None


def _parse_activations(raw: Any, where: str) -> bool:
    """Whether the checkpoint declares symmetric activations."""
    if raw is None:
        raise CheckpointError(
            f"{where} must describe dynamic INT8 activations per token, got null "
            "(weight-only quantisation, such as W4A16; weight_only='w4a8' runs it with INT8 activations)"
        )
    args = _arguments(raw, where)
    _expect(args["num_bits"], (8,), f"{where}.num_bits")
    _expect(args["type"], ("int",), f"{where}.type")
    _expect(args["dynamic"], (True,), f"{where}.dynamic")
    _expect(args["strategy"], ("token",), f"{where}.strategy")
    _expect(args["symmetric"], (True, False), f"{where}.symmetric")
    for field in ("group_size", "block_structure", "actorder"):
        _expect(args[field], (None,), f"{where}.{field}")
    return bool(args["symmetric"])


def _expect(value: Any, allowed: tuple[Any, ...], where: str) -> None:
    """Raises CheckpointError unless ``value`` is one of ``allowed``; 1 doesn't pass for true."""
    if any(value == a and type(value) is type(a) for a in allowed):
        return
    expected = " or ".join(_spell(a) for a in allowed)
    raise CheckpointError(f"{where} must be {expected}, got {_spell(value)}")


def _spell(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return shortened(value)


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    for field in sorted(set(fields) - known):
        if fields[field] is not None:
            raise CheckpointError(
                f"{where}.{field} is unknown and may change what the weights mean, got "
                f"{shortened(fields[field])}"
            )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{where} must be a JSON object, got {_spell(value)}")
    return value


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise CheckpointError(f"{where} must be a list of strings, got {_spell(value)}")
    for pattern in value:
        if pattern.startswith("re:"):
            check_pattern(pattern[3:], where)
    return tuple(value)
