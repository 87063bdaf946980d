"""Rotary positions and the ways to stretch them, as Hugging Face transformers computes them.

The kinds are those of ``rope_type``: RoPE itself (arXiv:2104.09864), ``linear`` interpolation
(arXiv:2306.15595), ``dynamic`` NTK scaling, ``yarn`` (arXiv:2309.00071) and the ``llama3`` rule of Llama 3.1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_w4a8.invariance import barrier, evenly, rounded
from jax_w4a8.models.span import Span

RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROTARY_KINDS: tuple[str, ...] = get_args(RotaryKind)

#: Cosines and sines, float32 ``[B, T, D / 2]`` each.
RotaryTable = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions. Static under ``jit``.

    Attributes:
      dim: width of what is turned, even.
      theta: base of the frequencies.
      kind: how they are stretched.
      factor: by how much; all kinds but ``default``.
      original_positions: tokens that the model was trained on; ``dynamic``, ``llama3`` and ``yarn``.
      attention_factor: multiplies cosines and sines; ``yarn``.
      beta_fast, beta_slow: turns within ``original_positions`` above and below which a frequency is kept or
        divided whole; ``yarn``.
      truncate: whether the bounds that follow from these are rounded to whole frequencies; ``yarn``.
      low_freq_factor, high_freq_factor: the same bounds for ``llama3``.
      interleaved: whether neighbours (2i, 2i + 1) are turned together instead of (i, i + D / 2).
    """

    dim: int
    theta: float = 10000.0
    kind: RotaryKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    interleaved: bool = False

    @property
    def positions(self) -> int:
        """Tokens that stretched positions were made for; 0 where the configuration's own number counts."""
        return round(self.factor * self.original_positions) if self.kind in ("dynamic", "yarn") else 0

    def frequencies(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Radians per position, float32 ``[D / 2]``; for ``dynamic`` those of short texts."""
        plain = self.theta ** -(np.arange(0, self.dim, 2) / self.dim)
        stretch = {"linear": self._linear, "llama3": self._llama3, "yarn": self._yarn}.get(self.kind)
        return (plain if stretch is None else stretch(plain)).astype(np.float32)

    def table(self, span: Span) -> RotaryTable:
        """Cosines and sines, float32 ``[B, T, D / 2]``, of a span's tokens.

        ``dynamic`` frequencies are those of each row's length so far, as in transformers: what is cached
        keeps the frequencies of its own call.
        """
        frequencies = self._dynamic(span.ends) if self.kind == "dynamic" else self.frequencies()[None]
        angles = span.positions.astype(jnp.float32)[..., None] * frequencies[:, None]

        # A loop's results are stored; else XLA computes cosines anew for every head that they turn.
        def one(is_cosine: jax.Array) -> jax.Array:
            return jnp.where(is_cosine, evenly(jnp.cos, angles), evenly(jnp.sin, angles))

        cosines, sines = lax.map(one, jnp.array([True, False])) * self.attention_factor
        return cosines, sines

    def rotate(self, x: jax.Array, table: RotaryTable) -> jax.Array:
        """Turns float32 ``[B, T, heads, D]``.

        Interleaved pairs come out as (i, i + D / 2): keys and queries alike, so that their products don't
        change.
        """
        first, second = (x[..., ::2], x[..., 1::2]) if self.interleaved else jnp.split(x, 2, axis=-1)
        cosines, sines = (barrier(part)[:, :, None, :] for part in table)
        turned = (
            rounded(first * cosines) - rounded(second * sines),
            rounded(second * cosines) + rounded(first * sines),
        )
        return jnp.concatenate(turned, axis=-1)

    def _dynamic(self, lengths: jax.Array) -> jax.Array:
        """float32 ``[B, D / 2]`` of int32 ``[B]``: the base grows with the length."""
        exponents = jnp.asarray(np.arange(0, self.dim, 2) / self.dim, jnp.float32)
        ratio = jnp.maximum(lengths, self.original_positions).astype(jnp.float32) / self.original_positions
        growth = (self.factor * ratio - (self.factor - 1))[:, None]
        base = evenly(lambda x: self.theta * x ** (self.dim / (self.dim - 2)), growth)
        return evenly(jnp.exp, -exponents * evenly(jnp.log, base))

    def _linear(self, plain: Any) -> Any:
        return plain / self.factor

    def _llama3(self, plain: Any) -> Any:
        turns = self.original_positions * plain / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(plain, self.factor, np.clip(keep, 0, 1))

    def _yarn(self, plain: Any) -> Any:
        low, high = self._frequency_of(self.beta_fast), self._frequency_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low or 0.001
        return _blend(plain, self.factor, 1 - np.clip((np.arange(len(plain)) - low) / width, 0, 1))

    def _frequency_of(self, turns: float) -> float:
        """Index of the frequency that makes so many turns within ``original_positions``."""
        ratio = self.original_positions / (turns * 2 * math.pi)
        return self.dim * math.log(ratio) / (2 * math.log(self.theta))


def _blend(plain: Any, factor: float, keep: Any) -> Any:
    return plain * keep + plain / factor * (1 - keep)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """YaRN's growth of attention logits: ``0.1 * weight * ln(factor) + 1``, 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
