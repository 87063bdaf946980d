"""Mixture-of-experts layers with INT4 weights and INT8 activations (W4A8) on CPUs, for JAX.

>>> import jax, jax.numpy as jnp, jax_w4a8 as w4a8
>>> w13, w2 = (w4a8.quantize(w, group_size=32) for w in (jnp.ones((4, 128, 64)), jnp.ones((4, 64, 64))))
>>> experts = w4a8.pack_experts(w13, w2)
>>> layer = jax.jit(lambda x, logits, experts: w4a8.moe(x, logits, experts, w4a8.Routing(top_k=2)))
>>> layer(jnp.ones((3, 64)), jnp.zeros((3, 4)), experts).shape
(3, 64)
"""

from jax_w4a8.experts.base import Activation
from jax_w4a8.ffi import (
    DISABLE_JAX_EXPORT_CHECKS,
    instruction_set,
    instruction_sets,
    native_available,
    release_scratch,
    set_instruction_set,
    thread_limit,
    using_instruction_set,
)
from jax_w4a8.linear import linear
from jax_w4a8.moe import apply_experts, combine, fused_experts, moe
from jax_w4a8.oracle import MoEConfig, W4A8Int8MoeBackend, explain, select_w4a8_int8_moe_backend
from jax_w4a8.quantization import GroupShape, QuantizedTensor, QuantizedWords, QuantKey, dequantize, quantize
from jax_w4a8.ragged import ragged_dot
from jax_w4a8.routing import Routing, route
from jax_w4a8.trainable import trainable_parts, with_trainable_parts
from jax_w4a8.weights import (
    ExpertWeights,
    LinearWeights,
    pack_experts,
    pack_linear,
    quantize_and_pack_experts,
    quantize_and_pack_linear,
    unpack_experts,
    unpack_linear,
)

__version__ = "0.1.0"

__all__ = [
    "DISABLE_JAX_EXPORT_CHECKS",
    "Activation",
    "ExpertWeights",
    "GroupShape",
    "LinearWeights",
    "MoEConfig",
    "QuantKey",
    "QuantizedTensor",
    "QuantizedWords",
    "Routing",
    "W4A8Int8MoeBackend",
    "apply_experts",
    "combine",
    "dequantize",
    "explain",
    "fused_experts",
    "instruction_set",
    "instruction_sets",
    "linear",
    "moe",
    "native_available",
    "pack_experts",
    "pack_linear",
    "quantize",
    "quantize_and_pack_experts",
    "quantize_and_pack_linear",
    "ragged_dot",
    "release_scratch",
    "route",
    "select_w4a8_int8_moe_backend",
    "set_instruction_set",
    "thread_limit",
    "trainable_parts",
    "unpack_experts",
    "unpack_linear",
    "using_instruction_set",
    "with_trainable_parts",
]
