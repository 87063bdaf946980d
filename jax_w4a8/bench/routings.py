"""Which experts random tokens choose."""

from __future__ import annotations

from typing import Any

import numpy as np

#: All experts alike; by Zipf's law (the hottest E times as likely as the coldest); all tokens the same k.
ROUTINGS = ("uniform", "zipf", "one")


def random_ids(
    num_experts: int, top_k: int, tokens: int, routing: str, rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """int32 ``[tokens, k]``, distinct within a token.

    Raises:
      ValueError: ``routing`` isn't one of :data:`ROUTINGS`.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {list(ROUTINGS)}, got {routing!r}")
    if routing == "one":
        hot = rng.permutation(num_experts)[:top_k].astype(np.int32)
        return np.broadcast_to(hot, (tokens, top_k)).copy()
    weight = np.ones(num_experts)
    if routing == "zipf":
        weight = 1 / (1 + rng.permutation(num_experts))
    # The k largest of exponential races: a draw without replacement by weight.
    races = rng.exponential(size=(tokens, num_experts)) / weight
    return np.argsort(races, axis=1)[:, :top_k].astype(np.int32)
