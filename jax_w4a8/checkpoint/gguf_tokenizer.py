"""The tokenizer inside a GGUF file, as the ``tokenizers`` package runs it: byte-pair models as in GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_w4a8.checkpoint.errors import CheckpointError, shortened
from jax_w4a8.checkpoint.gguf_file import read_gguf
from jax_w4a8.checkpoint.tokenizer_errors import tokenizer_errors

_KEY = "tokenizer.ggml"
#: ``token_type`` of tokens that text can't be split into: control, and those that a user defined.
_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
#: How ``tokenizer.ggml.pre`` splits text into words; None for GPT-2's own rule.
_SPLITS = {
    "gpt-2": None,
    "default": None,
    "olmo": None,
    "qwen2": _WORDS % r"\p{N}",
    "llama-bpe": _WORDS % r"\p{N}{1,3}",
}
_NORMALIZED = ("qwen2",)


def load_gguf_tokenizer(path: Path) -> Any:
    """The ``tokenizers.Tokenizer`` that a GGUF file's metadata describe.

    Raises:
      ImportError: ``tokenizers`` or ``gguf`` isn't installed.
      CheckpointError: the file has none, or one of another kind; the message says which.
    """
    metadata, _ = read_gguf(path)
    return make_tokenizer(metadata, str(path))


def _texts(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{where}: {key} is missing, or no list of texts")
    return value


def make_tokenizer(metadata: Mapping[str, Any], where: str) -> Any:
    """As :func:`load_gguf_tokenizer`, of metadata that were read before."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind, split = metadata.get(f"{_KEY}.model"), metadata.get(f"{_KEY}.pre", "default")
    if kind != "gpt2" or not isinstance(split, str) or split not in _SPLITS:
        raise CheckpointError(
            f"{where}: {_KEY}.model must be 'gpt2' with {_KEY}.pre of {sorted(_SPLITS)}, got "
            f"{shortened(kind)} with {shortened(split)}: text needs the model's tokenizer.json; token "
            "ids work without"
        )
    tokens, merges = (_texts(metadata, f"{_KEY}.{key}", where) for key in ("tokens", "merges"))
    kinds = metadata.get(f"{_KEY}.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise CheckpointError(f"{where}: {_KEY}.token_type must be a number for each of {len(tokens)} tokens")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    with tokenizer_errors(f"{where}: {_KEY}.merges don't fit {_KEY}.tokens"):
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    rule = _SPLITS[split]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule is None)
    tokenizer.pre_tokenizer = (
        whole
        if rule is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated"), whole])
    )
    if split in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(t, special=special, normalized=False)
            for t, k in zip(tokens, kinds, strict=True)
            if k == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer
