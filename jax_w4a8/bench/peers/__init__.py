"""Other runtimes on the same work, one file each; a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from jax_w4a8.bench.peers.base import Peer
from jax_w4a8.bench.peers.ktransformers import KTransformers
from jax_w4a8.bench.peers.llamacpp import LlamaCpp
from jax_w4a8.bench.peers.onnxruntime import OnnxRuntime
from jax_w4a8.bench.peers.openvino import OpenVino
from jax_w4a8.bench.peers.zentorch import ZenTorch

__all__ = ["PEERS", "LlamaCpp", "Peer", "find_peers"]

#: By the names that ``--peer`` takes; several ways of running one peer share its name.
PEERS: dict[str, tuple[Peer, ...]] = {
    "llama.cpp": (LlamaCpp("q4_0", True), LlamaCpp("q4_K", False), LlamaCpp("q4_K", True)),
    "zentorch": (ZenTorch(),),
    "onnxruntime": (OnnxRuntime(),),
    "openvino": (OpenVino(),),
    "ktransformers": (KTransformers(),),
}


def find_peers(names: Sequence[str]) -> list[Peer]:
    """The peers called ``names``, all of them usable here.

    Raises:
      ValueError: an unknown name; the message lists the known ones.
      ImportError: a package is missing; the message says how to install it.
    """
    found: list[Peer] = []
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer must be one of {list(PEERS)}, got {name!r}")
        for peer in PEERS[name]:
            peer.require()
            found.append(peer)
    return found
