"""A compressed-tensors checkpoint directory, module by module, with strict accounts of its tensors.

A model asks for every module that it has; each request checks names, shapes and dtypes by the files' headers
and claims the tensors. ``finish`` then raises if a tensor is left that no module claimed and no rule ignores.
Nothing large is read before that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.checkpoint.errors import CheckpointError
from jax_w4a8.checkpoint.scheme import QuantizationConfig, Scheme, parse_quantization_config
from jax_w4a8.checkpoint.stored import StoredArray, StoredLinear
from jax_w4a8.checkpoint.tensors import TensorFiles, TensorHeader, first_names, read_json
from jax_w4a8.quantization import CODES_PER_WORD, num_groups

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
FLOAT_DTYPES = ("BF16", "F16", "F32")

#: Tensors that a model has no use for: scales of a quantised KV cache (which stays in floating point here),
#: and rotary frequencies that old writers stored beside the configuration that they follow from.
IGNORED_TENSORS = (
    re.compile(r".*\.[qkv]_(scale|zero_point)$"),
    re.compile(r".*\.[kv]_proj\.output_(scale|zero_point)$"),
    re.compile(r".*\.rotary_emb\.inv_freq$"),
)


class Checkpoint:
    """A directory with ``config.json`` and ``.safetensors`` files in compressed-tensors W4A8 form.

    Attributes:
      directory: where it is.
      config: the whole ``config.json``.
      quantization: which modules are quantised, and how.
      files: the tensors.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads ``config.json`` and the headers of all files.

        Raises:
          CheckpointError: a file is missing or damaged, or the scheme isn't W4A8.
        """
        self.directory = Path(path)
        if not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a directory")
        config_file = self.directory / CONFIG_FILE
        self.config: dict[str, Any] = read_json(config_file)
        if self.config.get("quantization_config") is None:
            raise CheckpointError(
                f"{config_file} has no quantization_config: this is not a quantised checkpoint"
            )
        self.quantization: QuantizationConfig = parse_quantization_config(
            self.config["quantization_config"], f"{config_file}: quantization_config"
        )
        self.files = TensorFiles(self.directory)
        self._claimed: set[str] = set()

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.files.headers

    def array(self, name: str, shape: Sequence[int], *, nonzero: bool = False) -> StoredArray:
        """Claims a floating point tensor.

        Raises:
          CheckpointError: it is missing or has another shape or dtype.
        """
        self._claim(name, shape, FLOAT_DTYPES)
        return StoredArray(self.files, name, nonzero)

    def embedding(self, name: str, rows: int, features: int) -> StoredArray:
        """Claims an embedding's ``weight``, ``[rows, features]``.

        Raises:
          CheckpointError: as :meth:`array`, and if the configuration quantises embeddings.
        """
        if self.quantization.scheme_for(name, "Embedding") is not None:
            raise CheckpointError(
                f"{self.directory / CONFIG_FILE}: quantization_config quantises the embedding {name!r}, "
                "which isn't supported"
            )
        return self.array(f"{name}.weight", (rows, features), nonzero=True)

    def linear(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        nonzero: bool = False,
    ) -> StoredLinear:
        """Claims the tensors of a linear map ``[out_features, in_features]``.

        Args:
          name: the module's name.
          out_features, in_features: its sizes.
          bias: whether it has one.
          nonzero: refuse a floating point weight of nothing but zeros.

        Raises:
          CheckpointError: a tensor is missing, or has another shape or dtype than the scheme implies.
        """
        scheme = self.quantization.scheme_for(name)
        stored_bias = self.array(f"{name}.bias", (out_features,)) if bias else None
        weight = None
        if scheme is None:
            weight = self._float_weight(name, (out_features, in_features), nonzero)
        else:
            self._claim_quantized(name, out_features, in_features, scheme)
        return StoredLinear(self.files, name, out_features, in_features, scheme, weight, stored_bias)

    def tied_linear(self, name: str, embedding: StoredArray) -> None:
        """Accounts for an output head that shares the embedding's weights but is stored nevertheless.

        Raises:
          CheckpointError: the head's tensor differs from the embedding, or the head is quantised.
        """
        tensor = f"{name}.weight"
        stored = self.files.modules.get(name, [])
        if not stored:
            return
        if stored != [tensor]:
            raise CheckpointError(
                f"{self.directory}: config.json ties {name!r} to the embedding, but the files hold "
                f"{first_names(stored)}"
            )
        self._claim(tensor, embedding.shape, (embedding.dtype_name,))
        both = zip(self.files.pieces(tensor), self.files.pieces(embedding.name), strict=True)
        if not all(np.array_equal(head, rows) for head, rows in both):
            raise CheckpointError(
                f"{self.directory}: config.json ties {name!r} to the embedding, but {tensor!r} differs from "
                f"{embedding.name!r}"
            )
        logger.info("%s equals the embedding that it is tied to", tensor)

    def finish(self) -> None:
        """Raises CheckpointError if a tensor is left that nothing claimed; call it after the last request."""
        left = [n for n in self.files.headers if n not in self._claimed]
        ignored = [n for n in left if any(rule.match(n) for rule in IGNORED_TENSORS)]
        if ignored:
            logger.warning("ignored %d tensors of the checkpoint: %s", len(ignored), first_names(ignored))
        unknown = sorted(set(left).difference(ignored))
        if unknown:
            raise CheckpointError(
                f"{self.directory}: {len(unknown)} tensors belong to no module of this model: "
                f"{first_names(unknown)}"
            )

    def _float_weight(self, name: str, shape: tuple[int, int], nonzero: bool) -> StoredArray:
        if f"{name}.weight" not in self and f"{name}.weight_packed" in self:
            raise CheckpointError(
                f"{self.directory}: module {name!r} is not quantised by config.json, but the files hold "
                f"{name + '.weight_packed'!r}"
            )
        return self.array(f"{name}.weight", shape, nonzero=nonzero)

    def _claim_quantized(self, name: str, rows: int, columns: int, scheme: Scheme) -> None:
        scheme.check_inputs(name, columns)
        if f"{name}.weight_zero_point" in self:
            raise CheckpointError(
                f"{self.directory}: tensor {name + '.weight_zero_point'!r}: zero points aren't supported, "
                "weights must be symmetric"
            )
        if scheme.storage == "pack-quantized":
            words = -(-columns // CODES_PER_WORD)
            self._claim(f"{name}.weight_packed", (rows, words), ("I32",), scheme)
            self._claim(f"{name}.weight_shape", (2,), ("I64", "I32"), scheme)
        else:
            self._claim(f"{name}.weight", (rows, columns), ("I8",), scheme)
        groups = num_groups(scheme.group_size, columns)
        self._claim(f"{name}.weight_scale", (rows, groups), FLOAT_DTYPES, scheme)
        if f"{name}.weight_g_idx" in self:
            self._claim(f"{name}.weight_g_idx", (columns,), ("I32", "I64"), scheme)

    def _claim(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: tuple[str, ...],
        scheme: Scheme | None = None,
    ) -> None:
        header = self.files.headers.get(name)
        if header is None:
            raise CheckpointError(f"{self.directory}: {self._describe_missing(name, scheme)}")
        _check_header(name, header, tuple(shape), dtypes)
        self._claimed.add(name)

    def _describe_missing(self, name: str, scheme: Scheme | None) -> str:
        text = f"tensor {name!r} is missing"
        if scheme is not None:
            text += f" (config.json says {scheme.storage})"
        found = self.files.modules.get(name.rpartition(".")[0], [])
        return f"{text}; of that module the files hold {first_names(found)}" if found else text


def _check_header(name: str, header: TensorHeader, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if header.dtype not in dtypes:
        raise CheckpointError(
            f"{header.file}: tensor {name!r} must be {' or '.join(dtypes)}, got {header.dtype} "
            f"{list(header.shape)}"
        )
    if header.shape != shape:
        raise CheckpointError(
            f"{header.file}: tensor {name!r} must have shape {list(shape)}, got {list(header.shape)}"
        )
