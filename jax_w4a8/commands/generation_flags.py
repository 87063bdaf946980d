"""Flags of ``generate`` that say how text is made, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_w4a8.models import Decoder, Sampling
    from jax_w4a8.models.text import TextStream

_DRAWING = ("temperature", "top_k", "top_p", "min_p", "seed")
_GENERATION_CONFIG_FILE = "generation_config.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags."""
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--chat", action="store_true", help="the prompt is a user's message; put it into the chat template"
    )
    chat.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="prompt tokens at once, which bounds memory"
    )
    sampling = parser.add_argument_group(
        "sampling", "Without these the likeliest token is taken. Values not given are the model's own."
    )
    sampling.add_argument("--do-sample", action="store_true", help="draw tokens by probability")
    sampling.add_argument("--temperature", type=float, metavar="X")
    sampling.add_argument("--top-k", type=int, metavar="K", help="0 for all tokens")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--seed", type=int, metavar="N")
    sampling.add_argument("--repetition-penalty", type=float, metavar="X")


def read_sampling(arguments: argparse.Namespace, directory: Path) -> Sampling:
    """The sampling that was asked for; naming any of its numbers asks for sampling.

    Raises:
      TypeError, ValueError: a number is out of range.
      CheckpointError: ``generation_config.json`` is damaged.
    """
    from jax_w4a8.models import Sampling

    given = {name: getattr(arguments, name) for name in (*_DRAWING, "repetition_penalty")}
    given = {name: value for name, value in given.items() if value is not None}
    if not (arguments.do_sample or any(name in given for name in _DRAWING)):
        return Sampling(**given)
    return Sampling(do_sample=True, **(_own_values(directory) | given))


def _own_values(directory: Path) -> dict[str, Any]:
    """What a model's makers advise."""
    from jax_w4a8.checkpoint.tensors import read_json

    file = directory / _GENERATION_CONFIG_FILE
    config = read_json(file) if file.exists() else {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: config[name] for name in names if config.get(name) is not None}


def open_stream(
    model: Decoder, tokenizer: Any, prompt: str, directory: Path, arguments: argparse.Namespace
) -> TextStream:
    """The text that the flags ask for.

    Raises:
      TypeError, ValueError: a flag or the prompt doesn't fit the model.
      CheckpointError: there is no chat template.
      ImportError: a package that chat templates need is missing.
    """
    from jax_w4a8.models.prompts import DEFAULT_CHUNK
    from jax_w4a8.models.text import TextStream

    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system needs --chat")
    chunk = arguments.prefill_chunk
    return TextStream(
        model,
        tokenizer,
        _chat_ids(tokenizer, prompt, directory, arguments.system) if arguments.chat else prompt,
        arguments.max_new_tokens,
        sampling=read_sampling(arguments, directory),
        stop_strings=arguments.stop,
        prefill_chunk=DEFAULT_CHUNK if chunk is None else chunk,
    )


def _chat_ids(tokenizer: Any, prompt: str, directory: Path, system: str | None) -> list[int]:
    from jax_w4a8.models.chat import ChatTemplate

    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    text = ChatTemplate.load(directory).render(messages)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
