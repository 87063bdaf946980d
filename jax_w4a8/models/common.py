"""What the families' configurations have in common, read from a ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_w4a8.experts.base import Activation
from jax_w4a8.models.config import (
    AttentionConfig,
    DecoderConfig,
    DenseConfig,
    LatentAttentionConfig,
    MixtureConfig,
)
from jax_w4a8.models.fields import Fields
from jax_w4a8.models.rope_fields import read_rotary

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_attention(
    fields: Fields, *, head_dim: int | None = None, default_theta: float = 10000.0, **switches: Any
) -> AttentionConfig:
    """Grouped-query attention.

    Args:
      fields: the configuration.
      head_dim: where it doesn't say so; None for the hidden size divided by the heads.
      default_theta: base of the rotary frequencies where it doesn't say so.
      **switches: further attributes of :class:`AttentionConfig`.

    Raises:
      CheckpointError: a field is missing, of the wrong type, or contradicts another.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    width = fields.integer("head_dim", head_dim or fields.integer("hidden_size") // heads)
    if width % 2:
        raise fields.error("head_dim", "even")
    rotary = read_rotary(fields, width, default_theta=default_theta)
    return AttentionConfig(heads, kv_heads, width, rotary, **switches)


def every_layer(fields: Fields, attention: AttentionConfig) -> tuple[AttentionConfig, ...]:
    """The same attention over all positions in every layer."""
    return by_window(fields, attention, None, lambda layer: False)


def by_window(
    fields: Fields, attention: AttentionConfig, window: int | None, slides: Callable[[int], bool]
) -> tuple[AttentionConfig, ...]:
    """Each layer's attention: over a sliding window or over all positions.

    Args:
      fields: the configuration.
      attention: what all layers have in common.
      window: positions of the window; None for none.
      slides: the family's rule for which layers slide; ``layer_types`` goes before it.

    Raises:
      CheckpointError: ``layer_types`` isn't a kind for each layer, or asks for a window that there isn't.
    """
    layers = fields.integer("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if window is not None and slides(layer) else _FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"null or a kind for each of {layers} layers")
    allowed = (_FULL,) if window is None else (_FULL, _SLIDING)
    if any(kind not in allowed for kind in kinds):
        names = " or ".join(repr(kind) for kind in allowed)
        raise fields.error("layer_types", f"null or {names} for every layer")
    full, sliding = attention, dataclasses.replace(attention, window=window)
    return tuple(sliding if kind == _SLIDING else full for kind in kinds)


def switched_window(fields: Fields) -> int | None:
    """``sliding_window`` if ``use_sliding_window`` says so, as in Qwen's families."""
    if not fields.flag("use_sliding_window", False) or fields.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window")


def read_num_experts(fields: Fields) -> int:
    """The number of routed experts, by either name that most families go by."""
    return fields.same_integer("num_experts", "num_local_experts")


def read_top_k(fields: Fields, experts: int, default: int | None = None) -> int:
    """Experts per token, out of ``experts``."""
    top_k = fields.integer("num_experts_per_tok", default)
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"at most the number of experts, {experts}")
    return top_k


def stepped_mlps(
    fields: Fields, mixture: Callable[[], MixtureConfig]
) -> tuple[DenseConfig | MixtureConfig, ...]:
    """Qwen's schedule: layers whose number + 1 is a multiple of ``decoder_sparse_step`` are MoE, unless
    ``mlp_only_layers`` lists them.
    """
    step, dense_layers = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    layers = range(fields.integer("num_hidden_layers"))
    return scheduled_mlps(
        fields, [layer not in dense_layers and (layer + 1) % step == 0 for layer in layers], mixture
    )


def scheduled_mlps(
    fields: Fields, sparse: list[bool], mixture: Callable[[], MixtureConfig]
) -> tuple[DenseConfig | MixtureConfig, ...]:
    """Each layer's MLP; only the fields of kinds that occur are read."""
    moe = mixture() if any(sparse) else None
    dense = None if all(sparse) else DenseConfig(fields.integer("intermediate_size"))
    mlps = [moe if is_sparse else dense for is_sparse in sparse]
    return tuple(mlp for mlp in mlps if mlp is not None)


def dense_mlps(fields: Fields, *, bias: bool = False) -> tuple[DenseConfig, ...]:
    """A dense MLP in every layer."""
    return (DenseConfig(fields.integer("intermediate_size"), bias),) * fields.integer("num_hidden_layers")


def read_decoder(
    fields: Fields,
    model_type: str,
    attentions: tuple[AttentionConfig | LatentAttentionConfig, ...],
    mlps: tuple[DenseConfig | MixtureConfig, ...],
    *,
    activation: Activation | None = None,
    norm_epsilon: float = 1e-6,
    max_positions: int = 32768,
) -> DecoderConfig:
    """Puts a configuration together.

    Args:
      fields: the configuration.
      model_type: the family.
      attentions, mlps: each layer's halves.
      activation: None for the one that ``hidden_act`` names.
      norm_epsilon, max_positions: where the configuration doesn't say so.

    Raises:
      CheckpointError: a field is missing or of the wrong type.
    """
    positions = fields.integer("max_position_embeddings", max_positions)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        attentions=attentions,
        mlps=mlps,
        activation=activation or fields.activation("hidden_act"),
        norm_epsilon=fields.number("rms_norm_eps", norm_epsilon),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_positions=max(positions, attentions[0].rotary.positions),
        eos_token_ids=fields.integers("eos_token_id"),
    )
