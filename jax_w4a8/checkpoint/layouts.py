"""Where a checkpoint keeps the experts of a layer: a module per expert and projection, or fused tensors.

Fused tensors have one axis more, the experts'. They are ``[E, out, in]``, or ``[E, in, out]`` as gpt-oss and
Llama 4 store them; gate and up projections lie in one tensor, one after the other or alternating, or in two.
Each expert's part of them becomes a view under the name of a module of its own, so that all else reads one
kind of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.experts import StoredExperts
from jax_w4a8.checkpoint.scheme import Scheme
from jax_w4a8.checkpoint.stored import StoredLinear
from jax_w4a8.checkpoint.tensors import TensorFiles, TensorHeader, first_names
from jax_w4a8.quantization import CODES_PER_WORD, num_groups, unpack_words

if TYPE_CHECKING:
    from jax_w4a8.checkpoint.reader import Checkpoint

#: What the gate, up and down projections of an expert are called, besides a family's own names.
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
#: Names of fused tensors: gate and up in one, then down.
FUSED = (("gate_up_proj", "down_proj"), ("w13", "w2"))


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The experts of one layer: names and sizes.

    Attributes:
      module: what they are called together, such as ``model.layers.0.mlp.experts``.
      gate, up, down: names of an expert's projections, with ``{expert}`` for its number.
      num_experts, hidden_size, intermediate_size: E, H and I.
      bias: whether each projection has one.
      interleaved: gate and up channels of a fused tensor alternate.
    """

    module: str
    gate: str
    up: str
    down: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    interleaved: bool = False


def claim_experts(checkpoint: Checkpoint, layout: ExpertLayout) -> StoredExperts:
    """Claims the tensors of a layer's experts, in whichever layout the files hold them.

    Raises:
      CheckpointError: no known layout, or a tensor is missing or has another shape or dtype.
    """
    modules = checkpoint.files.modules
    for names in _names_per_expert(layout):
        if names[0].format(expert=0) in modules:
            return _separate(checkpoint, layout, names)
    fused = _find_fused(checkpoint.files, layout.module)
    if fused is None:
        raise CheckpointError(
            f"{checkpoint.directory}: {layout.module!r} has no experts in a known layout: "
            "neither modules such "
            f"as {layout.gate.format(expert=0)!r} nor fused tensors such as "
            f"{layout.module + '.' + FUSED[0][0]!r}; {_found(checkpoint.files, layout.module)}"
        )
    return _split(checkpoint, layout, fused)


def _found(files: TensorFiles, module: str) -> str:
    names = sorted(name for name in files.headers if name.startswith(f"{module}."))
    return f"the files hold {first_names(names)}" if names else "the files hold nothing of that name"


def _names_per_expert(layout: ExpertLayout) -> Iterator[tuple[str, str, str]]:
    yield layout.gate, layout.up, layout.down
    for gate, up, down in PROJECTIONS:
        prefix = f"{layout.module}.{{expert}}"
        yield f"{prefix}.{gate}", f"{prefix}.{up}", f"{prefix}.{down}"


def _separate(checkpoint: Checkpoint, layout: ExpertLayout, names: Sequence[str]) -> StoredExperts:
    hidden, inner = layout.hidden_size, layout.intermediate_size
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    gates, ups, downs = (
        tuple(
            checkpoint.linear(name.format(expert=expert), *shape, bias=layout.bias)
            for expert in range(layout.num_experts)
        )
        for name, shape in zip(names, shapes, strict=True)
    )
    return StoredExperts(layout.module, gates, ups, downs)


# ---------------------------------------------------------------------------------------------------------
# Fused tensors.


@dataclasses.dataclass(frozen=True)
class _Names:
    """The tensors of one fused parameter that are there."""

    parameter: str
    value: str
    scale: str | None
    shape: str | None
    bias: str | None
    zero_point: str | None


def _find_fused(files: TensorFiles, module: str) -> tuple[_Names, ...] | None:
    """Gate-and-up and down, or gate, up and down."""
    for stems in (*FUSED, *PROJECTIONS):
        found = [_find_parameter(files, f"{module}.{stem}") for stem in stems]
        if found[0] is not None:
            missing = [stem for stem, names in zip(stems, found, strict=True) if names is None]
            if missing:
                raise CheckpointError(
                    f"{files.directory}: tensor {module + '.' + missing[0]!r} is missing beside "
                    f"{found[0].value!r}"
                )
            return tuple(names for names in found if names is not None)
    return None


def _find_parameter(files: TensorFiles, parameter: str) -> _Names | None:
    """As a parameter of the experts' module (``X``, ``X_scale``), or as a module (``X.weight``, ...)."""

    def present(*names: str) -> str | None:
        return next((name for name in names if name in files.headers), None)

    for stem in (f"{parameter}.weight", parameter):
        value = present(f"{stem}_packed", stem)
        if value is not None:
            return _Names(
                parameter,
                value,
                scale=present(f"{stem}_scale"),
                shape=present(f"{stem}_shape"),
                bias=present(f"{parameter}.bias", f"{parameter}_bias"),
                zero_point=present(f"{stem}_zero_point"),
            )
    return None


@dataclasses.dataclass(frozen=True)
class _Fused:
    """One fused parameter as E matrices ``[N, K]``, whatever way they are stored.

    ``axis`` is where the outputs lie: 1 for ``[E, N, K]``, 2 for ``[E, K, N]``.
    """

    files: TensorFiles
    names: _Names
    scheme: Scheme | None
    axis: int
    rows: int
    columns: int

    def values(self, expert: int, rows: slice) -> np.ndarray[Any, Any]:
        """Rows of one expert: floating point, or codes of [-8, 7]."""
        packed = self.names.value.endswith("_packed")
        if self.axis == 1:
            part = self._part(self.names.value, expert, rows)
            return unpack_words(part, self.columns) if packed else part
        part = self._part(self.names.value, expert)
        if packed and part.shape[0] == self.columns:  # words along the outputs
            part = unpack_words(part, self.rows)
        elif packed:
            return unpack_words(part.T[rows], self.columns)
        return part.T[rows]

    def scales(self, expert: int, rows: slice) -> np.ndarray[Any, Any]:
        """Scales ``[rows, G]`` of one expert."""
        assert self.names.scale is not None
        if self.axis == 1:
            return self._part(self.names.scale, expert, rows)
        return self._part(self.names.scale, expert).T[rows]

    def bias(self, expert: int, rows: slice) -> np.ndarray[Any, Any]:
        """Biases of one expert."""
        assert self.names.bias is not None
        return self._part(self.names.bias, expert)[rows]

    def _part(self, name: str, expert: int, rows: slice = slice(None)) -> np.ndarray[Any, Any]:
        one = slice(expert, expert + 1)
        if rows.step in (None, 1):
            return self.files.read_part(name, one, *(() if rows == slice(None) else (rows,)))[0]
        return self.files.read_part(name, one)[0][rows]


def _split(checkpoint: Checkpoint, layout: ExpertLayout, names: tuple[_Names, ...]) -> StoredExperts:
    hidden, inner, files = layout.hidden_size, layout.intermediate_size, checkpoint.files
    together = len(names) == 2
    shapes = [(2 * inner, hidden)] if together else [(inner, hidden)] * 2
    shapes.append((hidden, inner))
    axes = _find_axes(files, names, layout.num_experts, shapes)
    parameters = [
        _claim_fused(checkpoint, layout, part, axis, shape)
        for part, axis, shape in zip(names, axes, shapes, strict=True)
    ]
    first, half, step = slice(0, inner), slice(inner, 2 * inner), layout.interleaved
    gate_rows, up_rows = (slice(0, None, 2), slice(1, None, 2)) if step else (first, half)
    gate, down = parameters[0], parameters[-1]
    up = gate if together else parameters[1]
    if not together:
        gate_rows = up_rows = first

    def every(part: _Fused, template: str, rows: slice, count: int) -> tuple[StoredLinear, ...]:
        return tuple(
            _view(checkpoint, part, template.format(expert=expert), expert, rows, count, layout.bias)
            for expert in range(layout.num_experts)
        )

    return StoredExperts(
        layout.module,
        gates=every(gate, layout.gate, gate_rows, inner),
        ups=every(up, layout.up, up_rows, inner),
        downs=every(down, layout.down, slice(0, hidden), hidden),
    )


def _find_axes(
    files: TensorFiles, names: tuple[_Names, ...], experts: int, shapes: Sequence[tuple[int, int]]
) -> list[int]:
    """Where the outputs lie, the same in all; shapes that allow both are decided by the others."""
    fits = []
    for part, (rows, columns) in zip(names, shapes, strict=True):
        packed = part.value.endswith("_packed")
        header = files.headers[part.value]
        possible = {
            1: [(experts, rows, _words(columns) if packed else columns)],
            2: [(experts, columns, _words(rows)), (experts, _words(columns), rows)]
            if packed
            else [(experts, columns, rows)],
        }
        axes = {axis for axis, allowed in possible.items() if header.shape in allowed}
        if not axes:
            expected = " or ".join(str(list(shape)) for allowed in possible.values() for shape in allowed)
            raise CheckpointError(
                f"{header.file}: tensor {part.value!r} must have shape {expected}, got {list(header.shape)}"
            )
        fits.append(axes)
    common = set.intersection(*fits)
    if len(common) == 1:
        return [common.pop()] * len(names)
    what = (
        "fits both [E, out, in] and [E, in, out]" if common else "has another order of axes than the others"
    )
    header = files.headers[names[-1].value]
    raise CheckpointError(f"{header.file}: tensor {names[-1].value!r} {list(header.shape)} {what}")


def _words(codes: int) -> int:
    return -(-codes // CODES_PER_WORD)


def _claim_fused(
    checkpoint: Checkpoint, layout: ExpertLayout, names: _Names, axis: int, shape: tuple[int, int]
) -> _Fused:
    rows, columns = shape
    header = checkpoint.claim(names.value)
    scheme = _scheme_of(checkpoint, layout, names, header)
    if layout.bias:
        bias = checkpoint.claim(names.bias or f"{names.parameter}_bias")
        _expect_shape(names.bias or "", bias, (layout.num_experts, rows))
    if scheme is not None:
        scheme.check_inputs(names.parameter, columns)
        groups = num_groups(scheme.group_size, columns)
        expected = (rows, groups) if axis == 1 else (groups, rows)
        scale = checkpoint.claim(names.scale or f"{names.parameter}_scale")
        _expect_shape(names.scale or "", scale, (layout.num_experts, *expected))
        if names.shape is not None:
            _check_stored_shape(checkpoint, names.shape, (layout.num_experts, *shape), axis)
    return _Fused(checkpoint.files, names, scheme, axis, rows, columns)


def _expect_shape(name: str, header: TensorHeader, shape: tuple[int, ...]) -> None:
    if header.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"{header.file}: tensor {name!r} must be BF16, F16 or F32, got {header.dtype}")
    if header.shape != shape:
        raise CheckpointError(
            f"{header.file}: tensor {name!r} must have shape {list(shape)} (groups run along inputs), got "
            f"{list(header.shape)}"
        )


def _check_stored_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], axis: int) -> None:
    experts, rows, columns = shape
    expected = [experts, rows, columns] if axis == 1 else [experts, columns, rows]
    header = checkpoint.claim(name)
    if header.dtype not in ("I32", "I64") or checkpoint.files.read(name).tolist() != expected:
        raise CheckpointError(f"{header.file}: tensor {name!r} must hold {expected}")


def _scheme_of(
    checkpoint: Checkpoint, layout: ExpertLayout, names: _Names, header: TensorHeader
) -> Scheme | None:
    """The scheme of a fused parameter, None for floating point: what the tensor and the configuration say."""
    if header.dtype in ("BF16", "F16", "F32"):
        return None
    if names.zero_point is not None:
        raise CheckpointError(
            f"{header.file}: tensor {names.zero_point!r}: zero points aren't supported, weights must be "
            "symmetric"
        )
    dtype = "I32" if names.value.endswith("_packed") else "I8"
    if header.dtype != dtype:
        raise CheckpointError(
            f"{header.file}: tensor {names.value!r} must be {dtype} or floating point, got {header.dtype}"
        )
    candidates = (names.parameter, layout.module, layout.gate.format(expert=0))
    scheme = next(filter(None, map(checkpoint.quantization.scheme_for, candidates)), None)
    if scheme is None:
        raise CheckpointError(
            f"{header.file}: {names.parameter!r} is not quantised by {checkpoint.where}, but tensor "
            f"{names.value!r} is {header.dtype}"
        )
    return scheme


def _view(
    checkpoint: Checkpoint, part: _Fused, name: str, expert: int, rows: slice, count: int, bias: bool
) -> StoredLinear:
    """Adds one expert's rows of a fused parameter as the tensors of a module ``name``, and claims them."""
    files = part.files

    def add(tensor: str, source: str, shape: tuple[int, ...], dtype: str, read: Callable[[], Any]) -> None:
        stored = files.headers[source]
        share = stored.nbytes * count // (stored.shape[0] * part.rows)
        files.add_view(tensor, TensorHeader(stored.file, shape, dtype, share), lambda: iter([read()]))

    names, headers = part.names, files.headers
    dtype = "I8" if part.scheme is not None else headers[names.value].dtype
    add(f"{name}.weight", names.value, (count, part.columns), dtype, lambda: part.values(expert, rows))
    scheme = part.scheme
    if scheme is not None and names.scale is not None:
        scheme = dataclasses.replace(scheme, storage="int-quantized")
        shape = (count, num_groups(scheme.group_size, part.columns))
        scale_dtype = headers[names.scale].dtype
        add(f"{name}.weight_scale", names.scale, shape, scale_dtype, lambda: part.scales(expert, rows))
    if bias and names.bias is not None:
        add(f"{name}.bias", names.bias, (count,), headers[names.bias].dtype, lambda: part.bias(expert, rows))
    return checkpoint.linear_of(scheme, name, count, part.columns, bias=bias)
