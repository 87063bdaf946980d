"""Swaps the float layers of a model of one's own for W4A8 ones, by rules on module paths."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_w4a8.blocks import quantize_for
from jax_w4a8.experts.base import Activation
from jax_w4a8.nnx.modules import W4A8Linear, W4A8MoE
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.routing import Routing
from jax_w4a8.weights import pack_linear


@dataclasses.dataclass(frozen=True)
class W4A8Options:
    """How a swapped layer is quantised, and how it runs.

    Attributes:
      group_size, scale_dtype: as for :func:`jax_w4a8.quantize`; more inputs per scale than there are is
        channel-wise.
      activation_scheme, backend: as for :func:`jax_w4a8.moe`.
    """

    group_size: int | None = 128
    scale_dtype: DTypeLike | None = None
    activation_scheme: str = "asymmetric"
    backend: str = "auto"

    def quantize(self, weight: Any) -> QuantizedTensor:
        """Codes and scales of float weights ``[..., N, K]``."""
        return quantize_for(jnp.asarray(weight), self.group_size, self.scale_dtype)

    def running(self) -> dict[str, Any]:
        """The part that concerns running, as keywords."""
        return {"activation_scheme": self.activation_scheme, "backend": self.backend}


Rules = Mapping[str | re.Pattern[str], W4A8Options | None]


@dataclasses.dataclass(frozen=True)
class FloatMoE:
    """What :func:`quantize_model` must know of an MoE module that it didn't write.

    Attributes:
      gate, up: ``[E, I, H]``.
      down: ``[E, H, I]``.
      router: ``[H, E]``; stays in floating point.
      routing: how experts are chosen.
      router_bias, correction_bias: ``[E]``, or None.
      gate_bias, up_bias, down_bias: ``[E, I]``, ``[E, I]``, ``[E, H]``, or None.
      shared: gate, up and down of the shared experts as one MLP, ``[S, H]``, ``[S, H]``, ``[H, S]``; or None.
      shared_gate: ``[H]``, or None.
      activation: between the projections.
      dtype: what inputs are cast to; None leaves them as they come.
    """

    gate: Any
    up: Any
    down: Any
    router: Any
    routing: Routing
    router_bias: Any = None
    correction_bias: Any = None
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None
    shared: tuple[Any, Any, Any] | None = None
    shared_gate: Any = None
    activation: str | Activation = "silu"
    dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True)
class ReportEntry:
    """What became of one layer.

    Attributes:
      path: where it is, names and indices joined by dots; every place of a layer that is shared.
      kind: the class that it had.
      shape: of its weights: N, K for linear maps; E, H, I for MoE.
      group_size: inputs per scale, -1 for channel-wise; None when it wasn't swapped.
      bytes_before, bytes_after: of its weights.
      error: root mean square of the change of the weights over that of the weights; None when it wasn't
        swapped, or under a transformation, where weights have no values.
      reason: why it wasn't swapped, or None.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    bytes_before: int
    group_size: int | None = None
    bytes_after: int | None = None
    error: float | None = None
    reason: str | None = None

    @property
    def swapped(self) -> bool:
        """Whether it is a W4A8 layer now."""
        return self.reason is None


class QuantizationReport(tuple[ReportEntry, ...]):
    """What :func:`quantize_model` did to each layer that it could have swapped; prints one a line."""

    __slots__ = ()

    @property
    def swapped(self) -> tuple[ReportEntry, ...]:
        """The layers that are W4A8 now."""
        return tuple(entry for entry in self if entry.swapped)

    @property
    def kept(self) -> tuple[ReportEntry, ...]:
        """The layers that stayed as they were; each has a ``reason``."""
        return tuple(entry for entry in self if not entry.swapped)

    def __str__(self) -> str:
        width = max((len(entry.path) for entry in self), default=0)
        lines = [f"{entry.path:<{width}}  {entry.kind:<10} {_describe(entry)}" for entry in self]
        before = sum(entry.bytes_before for entry in self.swapped)
        after = sum(entry.bytes_after or 0 for entry in self.swapped)
        lines.append(
            f"{len(self.swapped)} of {len(self)} layers swapped: {_bytes(before)} became {_bytes(after)}"
        )
        return "\n".join(lines)


def _describe(entry: ReportEntry) -> str:
    shape = "x".join(map(str, entry.shape))
    if entry.reason is not None:
        return f"{shape}: kept, {entry.reason}"
    scales = "channel-wise" if entry.group_size == -1 else f"groups of {entry.group_size}"
    sizes = f"{_bytes(entry.bytes_before)} -> {_bytes(entry.bytes_after or 0)}"
    change = "" if entry.error is None else f", weights changed by {entry.error:.1%}"
    return f"{shape}: {scales}, {sizes}{change}"


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def quantize_model(
    model: nnx.Module,
    rules: Rules | None = None,
    *,
    moe: Mapping[type[nnx.Module], Callable[[Any], FloatMoE]] | None = None,
    in_place: bool = False,
) -> tuple[Any, QuantizationReport]:
    r"""Swaps float ``nnx.Linear`` layers and MoE modules for :class:`W4A8Linear` and :class:`W4A8MoE`.

    >>> model = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.Linear(256, 64, rngs=nnx.Rngs(1)))
    >>> rules = {"layers.0": W4A8Options(group_size=64), re.compile(r"layers\.[1-9].*"): None}
    >>> quantized, report = quantize_model(model, rules)
    >>> [entry.path for entry in report.swapped], report.kept[0].reason
    (['layers.0'], "rule 'layers\\\\.[1-9].*' says so")

    Args:
      model: any NNX module. Create optimisers after the swap: they hold a state for each parameter.
      rules: from path patterns to :class:`W4A8Options`, or to None for layers that stay. A string is a glob
        (``"*"`` matches dots too) and a compiled pattern a regular expression, both for the whole path, such
        as ``"blocks.3.mlp.up"``. The first match counts; layers without one stay. None swaps all layers with
        the default options.
      moe: classes of MoE modules, each with a function that describes one as a :class:`FloatMoE`. Such a
        module is swapped as a whole, router included; layers inside a class not named here are swapped one
        by one, so keep a router out of it by a rule.
      in_place: change ``model`` itself. Otherwise the result is a new model, and arrays that weren't
        quantised are shared with the old one.

    Returns:
      The model (a W4A8 layer, if ``model`` itself was one to swap), and what became of each layer.

    Raises:
      TypeError, ValueError: a rule or a description is not what it must be, or a rule matched nothing (the
        message names it); ``in_place`` for a model that is itself a layer to swap.
    """
    swapper = _Swapper(_check_rules(rules), dict(moe or {}))
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be an nnx.Module, got {type(model).__name__}")
    if in_place and swapper.wants(model):
        raise ValueError("in_place can't swap the model itself: use the result of in_place=False")
    result = swapper.visit(model if in_place else nnx.clone(model), ())
    return result, swapper.report()


def _check_rules(rules: Rules | None) -> Rules:
    if rules is None:
        return {"*": W4A8Options()}
    for pattern, options in rules.items():
        if not isinstance(pattern, str | re.Pattern):
            raise TypeError(f"a rule's pattern must be a glob or a compiled pattern, got {pattern!r}")
        if options is not None and not isinstance(options, W4A8Options):
            raise TypeError(f"rule {_text(pattern)!r} must give W4A8Options or None, got {options!r}")
    return rules


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _matches(pattern: str | re.Pattern[str], path: str) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(path, pattern)
    return pattern.fullmatch(path) is not None


class _Swapper:
    """Walks a model once; a layer that is found twice is swapped once and stays shared."""

    def __init__(self, rules: Rules, moe: dict[type[nnx.Module], Callable[[Any], FloatMoE]]) -> None:
        self._rules = rules
        self._moe = moe
        self._used: set[str] = set()
        self._done: dict[int, Any] = {}
        self._kept_alive: list[Any] = []  # so that ids stay unique
        self._entries: dict[int, ReportEntry] = {}

    def wants(self, value: object) -> bool:
        """Whether this is a layer that could be swapped."""
        return isinstance(value, nnx.Linear) or type(value) in self._moe

    def report(self) -> QuantizationReport:
        """What was done; ValueError if a rule never matched."""
        unused = [_text(pattern) for pattern in self._rules if _text(pattern) not in self._used]
        if unused and self._rules.keys() != {"*"}:
            paths = [entry.path for entry in self._entries.values()]
            raise ValueError(f"rules {unused} match none of the layers {paths}")
        return QuantizationReport(self._entries.values())

    def visit(self, value: Any, path: tuple[str, ...]) -> Any:
        """What ``value`` is to be replaced by: often itself."""
        if id(value) in self._done:
            self._add_place(id(value), path)
            return self._done[id(value)]
        if not isinstance(value, nnx.Pytree | list | tuple | dict):
            return value
        self._kept_alive.append(value)
        if isinstance(value, nnx.Module) and self.wants(value):
            self._done[id(value)] = self._swap(value, path)
            return self._done[id(value)]
        self._done[id(value)] = value
        self._done[id(value)] = self._visit_children(value, path)
        return self._done[id(value)]

    def _visit_children(self, value: Any, path: tuple[str, ...]) -> Any:
        new = {key: self.visit(child, (*path, str(key))) for key, child in _children(value)}
        changed = {key: child for key, child in _children(value) if new[key] is not child}
        if isinstance(value, tuple):
            return type(value)(new.values()) if changed else value
        for key in changed:
            if isinstance(value, list | dict | nnx.List):
                value[key] = new[key]
            else:
                setattr(value, key, new[key])
        return value

    def _add_place(self, number: int, path: tuple[str, ...]) -> None:
        if number in self._entries:
            entry = self._entries[number]
            self._entries[number] = dataclasses.replace(entry, path=f"{entry.path} = {'.'.join(path)}")

    def _swap(self, layer: nnx.Module, path: tuple[str, ...]) -> nnx.Module:
        name = ".".join(path)
        described = _describe_layer(layer, self._moe.get(type(layer)), name)
        options, reason = self._options_for(name)
        if options is not None:
            reason = described.obstacle()
        if options is None or reason is not None:
            entry = ReportEntry(name, type(layer).__name__, described.shape, described.nbytes, reason=reason)
            self._entries[id(layer)] = entry
            return layer
        try:
            swapped, packed, error = described.swap(options)
        except (TypeError, ValueError) as problem:
            problem.add_note(f"while swapping layer {name!r}")
            raise
        self._entries[id(layer)] = ReportEntry(
            name,
            type(layer).__name__,
            described.shape,
            described.nbytes,
            group_size=packed.group_size,
            bytes_after=sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(swapped))),
            error=error,
        )
        return swapped

    def _options_for(self, path: str) -> tuple[W4A8Options | None, str | None]:
        for pattern, options in self._rules.items():
            if _matches(pattern, path):
                self._used.add(_text(pattern))
                return options, f"rule {_text(pattern)!r} says so" if options is None else None
        return None, "no rule matches"


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        return iter(list(value.items()))
    if isinstance(value, list | tuple | nnx.List):
        return iter(list(enumerate(value)))
    return iter([(k, v) for k, v in vars(value).items() if not k.startswith("_pytree__")])


@dataclasses.dataclass(frozen=True)
class _DescribedLinear:
    layer: nnx.Linear

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._kernel.shape[:-2], self._kernel.shape[-1], self._kernel.shape[-2])

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.layer, nnx.Param)))

    @property
    def _kernel(self) -> jax.Array:
        kernel: jax.Array = self.layer.kernel.get_value()
        return kernel

    def obstacle(self) -> str | None:
        if type(self.layer) is not nnx.Linear:
            return "a subclass of nnx.Linear, which may do more"
        if self.layer.dot_general is not jax.lax.dot_general:
            return "it has a dot_general of its own"
        return None

    def swap(self, options: W4A8Options) -> tuple[nnx.Module, QuantizedTensor, float | None]:
        layer, weight = self.layer, jnp.swapaxes(self._kernel, -1, -2)
        codes = options.quantize(weight)
        dtype = layer.dtype
        if dtype is None and jnp.dtype(layer.param_dtype) == jnp.float32:
            dtype = jnp.float32  # what nnx.Linear promotes to
        bias = None if layer.bias is None else layer.bias.get_value()
        swapped = W4A8Linear.from_packed(pack_linear(codes), bias, dtype=dtype, **options.running())
        return swapped, codes, _relative_error([(weight, codes)])


@dataclasses.dataclass(frozen=True)
class _DescribedMoE:
    moe: FloatMoE

    @property
    def shape(self) -> tuple[int, ...]:
        experts, inner, hidden = self.moe.gate.shape
        return (experts, hidden, inner)

    @property
    def nbytes(self) -> int:
        fields = [getattr(self.moe, field.name) for field in dataclasses.fields(self.moe)]
        return sum(leaf.nbytes for leaf in jax.tree.leaves(fields) if hasattr(leaf, "nbytes"))

    def obstacle(self) -> str | None:
        return None

    def swap(self, options: W4A8Options) -> tuple[nnx.Module, QuantizedTensor, float | None]:
        moe = self.moe
        floats = [jnp.concatenate([moe.gate, moe.up], axis=1), jnp.asarray(moe.down)]
        if moe.shared is not None:
            gate, up, down = moe.shared
            floats += [jnp.concatenate([gate, up]), jnp.asarray(down)]
        codes = [options.quantize(weight) for weight in floats]
        swapped = W4A8MoE.from_codes(
            codes[0],
            codes[1],
            moe.router,
            moe.routing,
            w13_bias=self._w13_bias(),
            w2_bias=moe.down_bias,
            router_bias=moe.router_bias,
            correction_bias=moe.correction_bias,
            shared=tuple(codes[2:]) or None,
            shared_gate=moe.shared_gate,
            activation=moe.activation,
            dtype=moe.dtype,
            **options.running(),
        )
        return swapped, codes[0], _relative_error(list(zip(floats, codes, strict=True)))

    def _w13_bias(self) -> jax.Array | None:
        biases = [bias for bias in (self.moe.gate_bias, self.moe.up_bias) if bias is not None]
        if len(biases) == 1:
            raise ValueError("gate_bias and up_bias must be given both or neither")
        return jnp.concatenate(biases, axis=1) if biases else None


def _describe_layer(
    layer: nnx.Module, describe: Callable[[Any], FloatMoE] | None, name: str
) -> _DescribedLinear | _DescribedMoE:
    if describe is None:
        assert isinstance(layer, nnx.Linear)
        return _DescribedLinear(layer)
    moe = describe(layer)
    if not isinstance(moe, FloatMoE):
        raise TypeError(
            f"moe[{type(layer).__name__}] must return a FloatMoE, got {type(moe).__name__} for {name!r}"
        )
    plain = {f.name: jax.tree.map(_plain, getattr(moe, f.name), is_leaf=_is_variable) for f in _fields(moe)}
    return _DescribedMoE(dataclasses.replace(moe, **plain))


def _fields(moe: FloatMoE) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(moe) if f.name not in ("routing", "activation", "dtype")]


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)


def _plain(value: Any) -> Any:
    return value.get_value() if _is_variable(value) else value


def _relative_error(pairs: list[tuple[jax.Array, QuantizedTensor]]) -> float | None:
    if any(isinstance(weight, jax.core.Tracer) for weight, _ in pairs):
        return None
    changed = sum(float(jnp.sum((codes.dequantize() - weight) ** 2)) for weight, codes in pairs)
    size = sum(float(jnp.sum(jnp.asarray(weight, jnp.float32) ** 2)) for weight, _ in pairs)
    return float(np.sqrt(changed / size)) if size else 0.0
