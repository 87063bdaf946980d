"""Which positions a call's tokens have, row by row."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["starts", "lengths"], meta_fields=["tokens"]
)
@dataclasses.dataclass(frozen=True)
class Span:
    """The next ``tokens`` tokens of each row, of which rows of a batch may use different numbers.

    A row's token at position p is always kept in slot p of the caches. So the keys that a token sees lie in
    the same places whatever the batch around it, and rows of unequal prompts need no padding on the left:
    what isn't text lies on the right, where no token sees it before another one takes its slot.

    Attributes:
      starts: int32 ``[B]``, position of each row's first token: the number of tokens before it.
      lengths: int32 ``[B]``, how many of each row's tokens are text, in [0, tokens]; the rest is padding,
        whose results mean nothing.
      tokens: T, static.
    """

    starts: jax.Array
    lengths: jax.Array
    tokens: int

    @property
    def positions(self) -> jax.Array:
        """int32 ``[B, T]``: each token's position, which is its slot too."""
        return self.starts[:, None] + jnp.arange(self.tokens, dtype=jnp.int32)

    @property
    def real(self) -> jax.Array:
        """bool ``[B, T]``: False for padding."""
        return jnp.arange(self.tokens, dtype=jnp.int32) < self.lengths[:, None]

    @property
    def ends(self) -> jax.Array:
        """int32 ``[B]``: each row's number of tokens after this call."""
        return self.starts + self.lengths

    def mask(self, slots: jax.Array, window: int | None = None) -> jax.Array:
        """bool ``[B, T, S]``: whether a token sees a slot, which is at most its own position.

        Args:
          slots: int32 ``[S]``, the slots asked about.
          window: how many positions a token sees, its own included; None for all.
        """
        distance = self.positions[:, :, None] - slots
        visible = distance >= 0
        return visible if window is None else visible & (distance < window)
