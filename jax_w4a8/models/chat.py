"""A conversation as the text that a model was trained on, by its tokenizer's own chat template.

Templates are Jinja programs that come with a checkpoint; they run in Jinja's sandbox. What they may use is
described in https://huggingface.co/docs/transformers/chat_templating_writing.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.checkpoint.tensors import read_json

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_FIELD = "chat_template"

#: ``{"role": "user", "content": "..."}``; templates may know further keys.
Message = Mapping[str, Any]


class ChatTemplate:
    """A checkpoint's chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        """Compiles a template.

        Args:
          source: the Jinja program.
          special_tokens: what it may use by name, such as ``bos_token``.
          where: what errors call it.

        Raises:
          ImportError: ``jinja2`` isn't installed.
          CheckpointError: it is no Jinja program.
        """
        self._where = where
        self._special_tokens = dict(special_tokens)
        self._template = _compile(source, where)

    @classmethod
    def load(cls, path: str | Path, name: str = "default") -> ChatTemplate:
        """The template of a checkpoint directory: ``chat_template.jinja``, else a field of
        ``tokenizer_config.json``.

        Args:
          path: the directory.
          name: which one, where ``tokenizer_config.json`` has several.

        Raises:
          ImportError: ``jinja2`` isn't installed.
          CheckpointError: there is none, or it is damaged.
        """
        directory = Path(path)
        config_file = directory / TOKENIZER_CONFIG_FILE
        config = read_json(config_file) if config_file.exists() else {}
        file = directory / TEMPLATE_FILE
        if file.exists():
            return cls(_read_template(file), _special_tokens(config), str(file))
        source = _named(config.get(_FIELD), name, str(config_file))
        if source is None:
            raise CheckpointError(
                f"{directory} has no chat template, neither {TEMPLATE_FILE} nor {_FIELD} in "
                f"{TOKENIZER_CONFIG_FILE}: its model wasn't made for chat, give it plain text"
            )
        return cls(source, _special_tokens(config), f"{config_file}: {_FIELD}")

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as one text, special tokens included: encode it with ``add_special_tokens=False``.

        Args:
          messages: what was said so far, each with a role and a content.
          add_generation_prompt: end with what begins the model's answer.
          **variables: whatever else the template knows, such as ``tools`` or ``enable_thinking``.

        Raises:
          TypeError, ValueError: ``messages`` is empty or malformed, or the template refuses it, fails or
            takes more than ten seconds.
        """
        _check_messages(messages)
        values = {"tools": None, "documents": None} | self._special_tokens | variables
        self._template.environment.start()
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except Exception as error:  # the template is a program, and may fail as any program does
            raise ValueError(f"messages don't fit the chat template {self._where}: {error}") from error


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of messages, got {messages!r}")
    if not messages:
        raise ValueError("messages must not be empty")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages must each have a role and a content, message {number} is {message!r}")


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; older files have objects in place of strings."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _named(value: Any, name: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    entries: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(e, Mapping) and _are_texts(e.get("name"), e.get("template")) for e in entries):
        raise CheckpointError(f"{where}: {_FIELD} must be a string or a list of named templates")
    named = {entry["name"]: entry["template"] for entry in entries}
    if name not in named:
        raise CheckpointError(f"{where}: {_FIELD} must have a template {name!r}, got {sorted(named)}")
    return str(named[name])


def _are_texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read as text: {error}") from error


def _compile(source: str, where: str) -> Any:
    try:
        from jax_w4a8.models.template_sandbox import Sandbox
    except ImportError as error:
        raise ImportError(
            f"{error}; chat templates need one more package: pip install 'jax_w4a8[chat]'"
        ) from error
    from jinja2 import TemplateError, TemplateSyntaxError

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # Jinja's own filter escapes for HTML.
        return json.dumps(value, **({"ensure_ascii": False} | options))

    environment = Sandbox()
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"{where} is no template: line {error.lineno}: {error.message}") from error
    except Exception as error:  # nested too deeply, or nothing that Python can compile
        raise CheckpointError(f"{where} is no template: {error}") from error
