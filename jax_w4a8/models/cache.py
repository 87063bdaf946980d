"""What a decoder remembers of the tokens before."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    Attributes:
      layers: keys and values per layer, float32 ``[B, S, kv heads, head dim]``.
      length: int32 scalar, positions filled so far.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]
    length: jax.Array
