"""The families that can be loaded, by ``model_type``. A new one is a file beside this and a line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.checkpoint.errors import shortened
from jax_w4a8.models import deepseek, gpt_oss, llama, mixtral, olmoe, qwen2, qwen2_moe, qwen3, qwen3_moe
from jax_w4a8.models.config import DecoderConfig, DecoderNames
from jax_w4a8.models.fields import Fields


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets one family of decoders apart.

    Attributes:
      configure: reads a ``config.json``.
      names: what its modules are called.
    """

    configure: Callable[[Fields], DecoderConfig]
    names: DecoderNames


FAMILIES: dict[str, Family] = {
    deepseek.MODEL_TYPE_V2: Family(deepseek.configure_v2, deepseek.NAMES),
    deepseek.MODEL_TYPE_V3: Family(deepseek.configure_v3, deepseek.NAMES),
    gpt_oss.MODEL_TYPE: Family(gpt_oss.configure, gpt_oss.NAMES),
    llama.MODEL_TYPE: Family(llama.configure, llama.NAMES),
    mixtral.MODEL_TYPE: Family(mixtral.configure, mixtral.NAMES),
    olmoe.MODEL_TYPE: Family(olmoe.configure, olmoe.NAMES),
    qwen2.MODEL_TYPE: Family(qwen2.configure, qwen2.NAMES),
    qwen2_moe.MODEL_TYPE: Family(qwen2_moe.configure, qwen2_moe.NAMES),
    qwen3.MODEL_TYPE: Family(qwen3.configure, qwen3.NAMES),
    qwen3_moe.MODEL_TYPE: Family(qwen3_moe.configure, qwen3_moe.NAMES),
}


def find_family(model_type: Any, where: str) -> Family:
    """The family of a ``config.json``'s ``model_type``.

    Raises:
      CheckpointError: it isn't known; the message lists those that are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type must be one of {sorted(FAMILIES)}, got {shortened(model_type)}"
        )
    return FAMILIES[model_type]
