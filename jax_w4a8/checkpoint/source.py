"""What a checkpoint is read from, whatever its files are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_w4a8.checkpoint.scheme import QuantizationConfig
from jax_w4a8.checkpoint.tensors import TensorFiles


@dataclasses.dataclass(frozen=True)
class Source:
    """A configuration with the tensors that belong to it.

    Attributes:
      where: what messages call the configuration.
      config: fields of ``config.json``.
      quantization: which modules are quantised, and how.
      files: the tensors, by their names in Hugging Face checkpoints.
    """

    where: str
    config: Mapping[str, Any]
    quantization: QuantizationConfig
    files: TensorFiles
