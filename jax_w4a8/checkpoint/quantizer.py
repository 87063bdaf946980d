"""From a floating point checkpoint to a compressed-tensors W4A8 one, piece by piece.

What goes where is planned from the files' headers; then file after file is written, each under a temporary
name until it is complete. A journal beside them says which are complete, so that a run that was ended goes on
where it was. ``config.json``, without which nothing takes the directory for a checkpoint, is written last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.layouts import FUSED, ExpertLayout, claim_experts
from jax_w4a8.checkpoint.reader import CONFIG_FILE, FLOAT_DTYPES, Checkpoint
from jax_w4a8.checkpoint.report import ModuleError, QuantizationReport
from jax_w4a8.checkpoint.scales import SCALE_METHODS, quantize_rows
from jax_w4a8.checkpoint.scheme import QuantizationConfig, parse_quantization_config
from jax_w4a8.checkpoint.stored import pack_words
from jax_w4a8.checkpoint.tensors import DTYPES, INDEX_FILE, SINGLE_FILE, TensorFiles, first_names, read_json
from jax_w4a8.checkpoint.writer import (
    PARTIAL_SUFFIX,
    SafetensorsWriter,
    TensorSpec,
    copy_whole,
    write_whole,
)
from jax_w4a8.quantization import CHANNELWISE, CODES_PER_WORD, GROUP_MULTIPLE, num_groups

JOURNAL_FILE = "quantize.journal.json"
REPORT_FILE = "quantization_report.json"
FORMATS = {"pack": "pack-quantized", "int": "int-quantized"}
DEFAULT_SHARD_BYTES = 2 << 30
#: Left in floating point whatever is asked: heads, routers and gates, embeddings, norms, other towers.
DEFAULT_IGNORE = (
    "lm_head",
    r"re:.*[.]gate$",
    r"re:.*[.]shared_expert_gate$",
    r"re:.*router([.].*)?$",
    r"re:.*embed[^.]*$",
    r"re:.*norm[^.]*$",
    r"re:.*(vision|visual|audio).*",
)
#: A directory may need so much more than its tensors.
_SPARE_BYTES = 16 << 20
_IN_A_LAYER = re.compile(r"(.*\.)?layers\.\d+\..+")
_FUSED_EXPERTS = re.compile(rf"(.*\.experts)\.({'|'.join(first for first, _ in FUSED)})(\.weight)?")
#: Families whose fused expert tensors alternate gate and up channels.
_INTERLEAVED = ("gpt_oss",)
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


@dataclasses.dataclass(frozen=True)
class QuantizeOptions:
    """What is asked of the quantiser.

    Attributes:
      group_size: inputs per scale, a multiple of 32; -1 for one scale per output channel.
      format: ``pack`` (eight codes per 32-bit word) or ``int`` (one code per byte).
      scale: ``absmax`` (the largest magnitude of a group decides) or ``mse`` (least squared error).
      ignore: further modules to leave in floating point: names, or expressions after ``re:``.
      max_shard_bytes: how large a file may become; one tensor may be larger.
    """

    group_size: int = 128
    format: str = "pack"
    scale: str = "absmax"
    ignore: tuple[str, ...] = ()
    max_shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self) -> None:
        size = self.group_size
        if size != CHANNELWISE and (size <= 0 or size % GROUP_MULTIPLE):
            raise ValueError(
                f"group_size must be -1 (channel-wise) or a positive multiple of {GROUP_MULTIPLE}, got {size}"
            )
        for name, value, allowed in (
            ("format", self.format, FORMATS),
            ("scale", self.scale, SCALE_METHODS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be positive, got {self.max_shard_bytes}")


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    options: QuantizeOptions | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizationReport:
    """Writes a compressed-tensors W4A8 checkpoint of a floating point one.

    Memory stays bounded by pieces of tensors (and, of fused experts, one expert), whatever the model's size.
    A run that was ended, at whatever moment, goes on when it is called again with the same arguments, and
    gives the same files, bit for bit.

    Args:
      source: a Hugging Face directory: ``config.json`` and ``.safetensors`` files in BF16, F16 or F32.
      destination: a directory that is new, empty, or left by an unfinished run.
      options: how to quantise; None for the defaults.
      progress: called with the bytes read so far and in all.

    Returns:
      Each module's error, which is also written to ``quantization_report.json``.

    Raises:
      CheckpointError: ``source`` is damaged, not in floating point, or has a module that can't be quantised
        as asked; the message names the file, tensor or field.
      FileExistsError: ``destination`` holds something else, or another run is writing to it.
      OSError: it can't be written, or has too little space; nothing is written then.
    """
    options = options or QuantizeOptions()
    plan = _plan(Path(source), options)
    with _locked(Path(destination), plan) as journal:
        _check_space(plan, journal)
        journal.start()
        progress_of = _Progress(progress, plan, journal)
        for shard in plan.shards:
            if shard.file not in journal.done:
                journal.add(shard.file, _write_shard(plan, shard, journal.directory, progress_of))
        return _finish(plan, journal)


# ---------------------------------------------------------------------------------------------------------
# The plan.


@dataclasses.dataclass(frozen=True)
class _Item:
    """A tensor of the source: quantised as the weight of ``module``, or copied (``module`` None)."""

    tensor: str
    module: str | None
    outputs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.outputs)


@dataclasses.dataclass(frozen=True)
class _Shard:
    file: str
    items: tuple[_Item, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclasses.dataclass(frozen=True)
class _Plan:
    source: Path
    options: QuantizeOptions
    config: dict[str, Any]
    files: TensorFiles
    shards: tuple[_Shard, ...]
    fingerprint: str

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def _plan(source: Path, options: QuantizeOptions) -> _Plan:
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a directory")
    config = read_json(source / CONFIG_FILE)
    for field in ("quantization_config", "compression_config"):
        if config.get(field) is not None:
            raise CheckpointError(
                f"{source / CONFIG_FILE}: {field} is there: the checkpoint is quantised already, and the "
                "quantiser starts from floating point weights"
            )
    checkpoint = Checkpoint(source, allow_float=True)
    files = checkpoint.files
    fused = _split_fused_experts(checkpoint, config)
    rules = QuantizationConfig((), _compile_ignore(options.ignore))
    items = [_item(files, name, rules, options) for name in files.headers if name not in fused]
    modules = [item.module for item in items if item.module is not None]
    if not modules:
        raise CheckpointError(f"{source} has no linear maps of decoder layers left to quantise")
    _check_widths(files, items, options)
    quantization = _quantization_config(files, items, options)
    _check_config(quantization, items)
    shards = _shards(items, options.max_shard_bytes)
    fingerprint = _fingerprint(source, files, options)
    return _Plan(source, options, config | {"quantization_config": quantization}, files, shards, fingerprint)


def _compile_ignore(patterns: Sequence[str]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"ignore holds {pattern!r}, not a regular expression: {error}") from error
    return (*DEFAULT_IGNORE, *patterns)


def _split_fused_experts(checkpoint: Checkpoint, config: Mapping[str, Any]) -> set[str]:
    """Adds a view for every expert of fused tensors, and returns the tensors that they stand for."""
    text = config.get("text_config") or config
    hidden = text.get("hidden_size")
    before = set(checkpoint.files.headers)
    modules = {}
    for name in before:
        match = _FUSED_EXPERTS.fullmatch(name)
        if match:
            modules[match[1]] = checkpoint.files.headers[name].shape
    for module, shape in sorted(modules.items()):
        if not isinstance(hidden, int) or len(shape) != 3 or hidden not in shape[1:]:
            raise CheckpointError(
                f"{checkpoint.directory}: fused experts {module!r} {list(shape)} don't fit hidden_size "
                f"{hidden!r}"
            )
        prefix = f"{module}.{{expert}}"
        claim_experts(
            checkpoint,
            ExpertLayout(
                module,
                f"{prefix}.gate_proj",
                f"{prefix}.up_proj",
                f"{prefix}.down_proj",
                num_experts=shape[0],
                hidden_size=hidden,
                intermediate_size=shape[1] * shape[2] // hidden // 2,
                bias=any(
                    f"{module}.{stem}{end}" in before for stem, _ in FUSED for end in ("_bias", ".bias")
                ),
                interleaved=text.get("model_type") in _INTERLEAVED,
            ),
        )
    prefixes = tuple(f"{module}." for module in modules)
    return {name for name in before if prefixes and name.startswith(prefixes)}


def _item(files: TensorFiles, name: str, rules: QuantizationConfig, options: QuantizeOptions) -> _Item:
    header = files.headers[name]
    module, _, kind = name.rpartition(".")
    if header.dtype not in DTYPES:
        raise CheckpointError(
            f"{header.file}: tensor {name!r} is {header.dtype}; the quantiser starts from floating point "
            "weights "
            f"({', '.join(FLOAT_DTYPES)})"
        )
    quantised = (
        kind == "weight"
        and len(header.shape) == 2
        and header.dtype in FLOAT_DTYPES
        and min(header.shape) > 0
        and _IN_A_LAYER.fullmatch(module) is not None
        and not rules.ignores(module)
    )
    if not quantised:
        return _Item(name, None, (TensorSpec(name, header.shape, header.dtype),))
    return _Item(name, module, _quantized_specs(module, header.shape, header.dtype, options))


def _quantized_specs(
    module: str, shape: tuple[int, ...], dtype: str, options: QuantizeOptions
) -> tuple[TensorSpec, ...]:
    rows, columns = shape
    scale = TensorSpec(
        f"{module}.weight_scale",
        (rows, num_groups(options.group_size, columns)),
        "BF16" if dtype == "BF16" else "F32",
    )
    if options.format == "int":
        return TensorSpec(f"{module}.weight", (rows, columns), "I8"), scale
    words = -(-columns // CODES_PER_WORD)
    packed = TensorSpec(f"{module}.weight_packed", (rows, words), "I32")
    return packed, scale, TensorSpec(f"{module}.weight_shape", (2,), "I64")


def _check_widths(files: TensorFiles, items: Sequence[_Item], options: QuantizeOptions) -> None:
    """Hugging Face tools read no short last group, so that none is written."""
    size = options.group_size
    if size == CHANNELWISE:
        return
    widths = {item.module: files.headers[item.tensor].shape[1] for item in items if item.module is not None}
    uneven = [f"{module} (width {width})" for module, width in widths.items() if width % size]
    if uneven:
        raise CheckpointError(
            f"group_size {size} doesn't divide the input width of {len(uneven)} modules: choose another "
            f"group_size, or leave them in floating point by ignore: {first_names(uneven)}"
        )


def _quantization_config(
    files: TensorFiles, items: Sequence[_Item], options: QuantizeOptions
) -> dict[str, Any]:
    """As compressed-tensors writes it; ``ignore`` covers every matrix left in floating point."""
    patterns = _compile_ignore(options.ignore)
    rules = QuantizationConfig((), patterns)
    others = [
        item.tensor.rpartition(".")[0]
        for item in items
        if item.module is None
        and len(files.headers[item.tensor].shape) == 2
        and item.tensor.endswith(".weight")
    ]
    named = sorted(module for module in others if not rules.ignores_itself(module))
    grouped = options.group_size != CHANNELWISE
    common = {"type": "int", "symmetric": True, "actorder": None, "block_structure": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[options.format],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": [*patterns, *named],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": FORMATS[options.format],
                "weights": {
                    **common,
                    "num_bits": 4,
                    "dynamic": False,
                    "strategy": "group" if grouped else "channel",
                    "group_size": options.group_size if grouped else None,
                },
                "input_activations": {
                    **common,
                    "num_bits": 8,
                    "dynamic": True,
                    "strategy": "token",
                    "group_size": None,
                    "observer": None,
                },
                "output_activations": None,
            }
        },
    }


def _check_config(quantization: dict[str, Any], items: Sequence[_Item]) -> None:
    """What is written must be what a reader makes of it."""
    parsed = parse_quantization_config(quantization)
    wrong = [
        item.module for item in items if item.module is not None and parsed.scheme_for(item.module) is None
    ]
    if wrong:
        raise CheckpointError(f"ignore contradicts itself about {first_names(wrong)}")


def _shards(items: Sequence[_Item], limit: int) -> tuple[_Shard, ...]:
    groups: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if groups[-1] and size + item.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.nbytes
    if len(groups) == 1:
        return (_Shard(SINGLE_FILE, tuple(groups[0])),)
    return tuple(
        _Shard(f"model-{i:05}-of-{len(groups):05}.safetensors", tuple(group))
        for i, group in enumerate(groups, 1)
    )


def _fingerprint(source: Path, files: TensorFiles, options: QuantizeOptions) -> str:
    """Changes with the options and with what is in the source."""
    stored = sorted({header.file for header in files.headers.values()})
    state = [
        dataclasses.asdict(options),
        (source / CONFIG_FILE).read_text(),
        [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in stored],
        [[name, header.shape, header.dtype] for name, header in files.headers.items()],
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------
# The run.


class _Journal:
    """Which files are complete, with the errors of the modules in them."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.directory = directory
        self._file = directory / JOURNAL_FILE
        self._state: dict[str, Any] = {"fingerprint": fingerprint, "files": {}}
        if self._file.exists():
            found = read_json(self._file)
            if found.get("fingerprint") != fingerprint or not isinstance(found.get("files"), dict):
                raise FileExistsError(
                    f"{directory} holds an unfinished run with other options or another source: repeat its "
                    "command, or remove the directory"
                )
            self._state = found

    def start(self) -> None:
        """Marks the directory as this run's."""
        self._save()

    @property
    def done(self) -> Mapping[str, dict[str, list[float]]]:
        """Complete files, each with the squared error and squared norm of its modules."""
        files: dict[str, dict[str, list[float]]] = self._state["files"]
        return {name: errors for name, errors in files.items() if (self.directory / name).exists()}

    def add(self, file: str, errors: dict[str, list[float]]) -> None:
        """Notes a file that has its name."""
        self._state["files"][file] = errors
        self._save()

    def remove(self) -> None:
        """Forgets the run, which is over."""
        self._file.unlink()

    def _save(self) -> None:
        write_whole(self._file, json.dumps(self._state).encode())


@contextlib.contextmanager
def _locked(destination: Path, plan: _Plan) -> Iterator[_Journal]:
    """The journal of a directory that nobody else writes to."""
    if destination.exists() and not destination.is_dir():
        raise FileExistsError(f"{destination} is not a directory")
    if destination.resolve() == plan.source.resolve():
        raise FileExistsError(f"{destination} is the source itself")
    destination.mkdir(parents=True, exist_ok=True)
    handle = os.open(destination, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(f"another run is writing to {destination}") from error
        _check_destination(destination)
        yield _Journal(destination, plan.fingerprint)
    finally:
        os.close(handle)


def _check_destination(destination: Path) -> None:
    """Nothing but what an unfinished run left; what it left half-written goes."""
    present = sorted(destination.iterdir())
    for file in present:
        if file.name == f"{JOURNAL_FILE}{PARTIAL_SUFFIX}" or (
            file.name.endswith(PARTIAL_SUFFIX) and (destination / JOURNAL_FILE).exists()
        ):
            file.unlink()
    left = [file.name for file in present if file.exists()]
    if left and JOURNAL_FILE not in left:
        raise FileExistsError(f"{destination} is not empty: it holds {first_names(left)}")


def _check_space(plan: _Plan, journal: _Journal) -> None:
    copies = sum(file.stat().st_size for file in _other_files(plan.source))
    done = sum(shard.nbytes for shard in plan.shards if shard.file in journal.done)
    needed = plan.nbytes - done + copies + _SPARE_BYTES
    free = shutil.disk_usage(journal.directory).free
    if needed > free:
        raise OSError(
            f"{journal.directory} needs {needed / 2**30:.2f} GiB more, but only {free / 2**30:.2f} GiB "
            "are free"
        )


class _Progress:
    """Bytes of the source read so far."""

    def __init__(self, report: Callable[[int, int], None], plan: _Plan, journal: _Journal) -> None:
        headers = plan.files.headers
        self._report = report
        sizes = {s.file: sum(headers[item.tensor].nbytes for item in s.items) for s in plan.shards}
        self._total = sum(sizes.values())
        self._done = sum(size for file, size in sizes.items() if file in journal.done)
        report(self._done, self._total)

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        self._report(self._done, self._total)


def _write_shard(
    plan: _Plan, shard: _Shard, directory: Path, progress: Callable[[int], None]
) -> dict[str, list[float]]:
    """Writes one file; the squared error and squared norm of each quantised module."""
    errors: dict[str, list[float]] = {}
    specs = [spec for item in shard.items for spec in item.outputs]
    with SafetensorsWriter(directory / shard.file, specs) as writer:
        for item in shard.items:
            if item.module is None:
                _copy(plan.files, item, writer)
            else:
                errors[item.module] = _quantize(plan, item, writer)
            progress(plan.files.headers[item.tensor].nbytes)
        writer.commit()
    return errors


def _copy(files: TensorFiles, item: _Item, writer: SafetensorsWriter) -> None:
    if not files.headers[item.tensor].shape:
        writer.write(item.tensor, files.read(item.tensor))
        return
    for piece in files.pieces(item.tensor):
        writer.write(item.tensor, piece)


def _quantize(plan: _Plan, item: _Item, writer: SafetensorsWriter) -> list[float]:
    values, scale = item.outputs[:2]
    error = norm = 0.0
    for piece in plan.files.pieces(item.tensor):
        rows = quantize_rows(piece, plan.options.group_size, DTYPES[scale.dtype], plan.options.scale)
        if not rows.finite:
            file = plan.files.headers[item.tensor].file
            raise CheckpointError(f"{file}: tensor {item.tensor!r} holds NaN or infinity")
        writer.write(values.name, pack_words(rows.codes) if values.dtype == "I32" else rows.codes)
        writer.write(scale.name, rows.scale)
        error += rows.squared_error
        norm += rows.squared_norm
    for spec in item.outputs[2:]:
        writer.write(spec.name, np.asarray(plan.files.headers[item.tensor].shape, np.int64))
    return [error, norm]


def _finish(plan: _Plan, journal: _Journal) -> QuantizationReport:
    """All that isn't a tensor; ``config.json`` last."""
    directory = journal.directory
    if len(plan.shards) > 1:
        weight_map = {spec.name: s.file for s in plan.shards for i in s.items for spec in i.outputs}
        index = {"metadata": {"total_size": plan.nbytes}, "weight_map": weight_map}
        write_whole(directory / INDEX_FILE, _json(index))
    for file in _other_files(plan.source):
        copy_whole(file, directory / file.name)
    report = _report(plan, journal)
    write_whole(directory / REPORT_FILE, _json(report.as_dict()))
    write_whole(directory / CONFIG_FILE, _json(plan.config))
    journal.remove()
    return report


def _report(plan: _Plan, journal: _Journal) -> QuantizationReport:
    done = journal.done
    shapes = {i.module: plan.files.headers[i.tensor].shape for s in plan.shards for i in s.items if i.module}
    errors = [
        ModuleError(module, shapes[module], *sums)
        for shard in plan.shards
        for module, sums in done[shard.file].items()
    ]
    options = dataclasses.asdict(plan.options)
    return QuantizationReport({k: options[k] for k in ("group_size", "format", "scale")}, tuple(errors))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _other_files(source: Path) -> list[Path]:
    """Tokenizer and whatever else belongs to a model, weights in any format left out."""
    return [
        file
        for file in sorted(source.iterdir())
        if file.is_file()
        and file.suffix not in _WEIGHT_SUFFIXES
        and not file.name.startswith(".")
        and not file.name.endswith((".index.json", PARTIAL_SUFFIX))
        and file.name not in (CONFIG_FILE, REPORT_FILE, JOURNAL_FILE)
    ]
