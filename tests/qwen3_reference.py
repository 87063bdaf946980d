"""Qwen3-MoE in plain numpy, straight from a checkpoint's file: an independent reference for whole models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .checkpoints import read_tensors


class Reference:
    """A float32 forward with dequantised weights.

    Attributes:
      scheme: how inputs of quantised linear maps are fake-quantised; None not at all.
      choices: the experts of the last run's MoE layers, ``[T, k]`` each.
      forced: if set, experts to take instead of the router's, in the form of ``choices``.
    """

    def __init__(self, directory: Path, scheme: str | None) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.tensors = read_tensors(directory)
        self.scheme = scheme
        self.choices: list[np.ndarray] = []
        self.forced: list[np.ndarray] | None = None

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        """int ``[T]`` to logits ``[T, V]``."""
        config = self.config
        self.choices = []
        x = self._float("model.embed_tokens")[token_ids]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x))
            h = self._norm(f"{name}.post_attention_layernorm", x)
            dense = layer in config["mlp_only_layers"]
            x = x + (self._mlp(f"{name}.mlp", h) if dense else self._moe(f"{name}.mlp", h))
        return self._norm("model.norm", x) @ self._float("lm_head").T

    def _float(self, name: str) -> np.ndarray:
        return self.tensors[f"{name}.weight"].astype(np.float32)

    def _weight(self, name: str) -> np.ndarray:
        if f"{name}.weight_packed" in self.tensors:
            words = self.tensors[f"{name}.weight_packed"].view(np.uint32)[:, :, None]
            nibbles = words >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
            codes = nibbles.reshape(len(words), -1).astype(np.int32) - 8
            codes = codes[:, : self.tensors[f"{name}.weight_shape"][1]]
        else:
            codes = self.tensors[f"{name}.weight"].astype(np.int32)
        scale = self.tensors[f"{name}.weight_scale"].astype(np.float64)
        return codes * np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)

    def _fake_quantize(self, x: np.ndarray) -> np.ndarray:
        if self.scheme is None:
            return x
        low = np.minimum(0, x.min(-1, keepdims=True))
        high = np.maximum(0, x.max(-1, keepdims=True))
        if self.scheme == "symmetric":
            peak = np.maximum(-low, high)
            codes = np.clip(np.rint(x * (np.float32(127) / peak)), -127, 127)
            return codes * (peak / np.float32(127))
        factor = np.float32(255) / (high - low)
        below, above = low * factor, high * factor
        zero = np.where(below + above - 1 > 0, -128 - below, 127 - above)
        zero = np.rint(np.clip(zero, -128, 127))
        codes = np.clip(np.rint(x * factor) + zero, -128, 127)
        return (codes - zero) * (np.float32(1) / factor)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        product = self._fake_quantize(x).astype(np.float64) @ self._weight(name).T
        return product.astype(np.float32)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        variance = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(variance + self.config["rms_norm_eps"]) * self._float(name)

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attention(self, name: str, x: np.ndarray) -> np.ndarray:
        tokens, dim = len(x), self.config["head_dim"]
        q, k, v = (self._linear(f"{name}.{n}_proj", x).reshape(tokens, -1, dim) for n in "qkv")
        q = self._rotate(self._norm(f"{name}.q_norm", q))
        k = self._rotate(self._norm(f"{name}.k_norm", k))
        shared = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
        scores = np.einsum("tnd,snd->nts", q, k) / np.sqrt(dim)
        scores = scores + np.triu(np.full((tokens, tokens), -np.inf), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("nts,snd->tnd", weights, v).reshape(tokens, -1)
        return self._linear(f"{name}.o_proj", mixed.astype(np.float32))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        dim = x.shape[-1]
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(len(x))[:, None] / theta ** (np.arange(0, dim, 2) / dim)
        pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
        turned = pairs * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1).astype(np.float32)

    def _moe(self, name: str, x: np.ndarray) -> np.ndarray:
        logits = x @ self._float(f"{name}.gate").T
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : self.config["num_experts_per_tok"]]
        if self.forced is not None:
            ids = self.forced[len(self.choices)]
        self.choices.append(ids)
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        weights = np.take_along_axis(scores, ids, axis=1)
        if self.config["norm_topk_prob"]:
            weights /= weights.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for expert in range(logits.shape[1]):
            tokens, slots = np.nonzero(ids == expert)
            if len(tokens):
                part = self._mlp(f"{name}.experts.{expert}", x[tokens])
                y[tokens] += weights[tokens, slots, None] * part
        return y
