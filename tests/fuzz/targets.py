"""What is fuzzed: everything that reads a file from a stranger, each with the exceptions it documents.

A target takes bytes and returns; any exception that escapes it is a fault. The first two bytes say which file
of which checkpoint the rest becomes the content of.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.checkpoint.packed_file import UnusableFileError, read_packed_file, write_packed_file
from jax_w4a8.models import default_model_path
from jax_w4a8.models.chat import ChatTemplate
from jax_w4a8.models.detokenizer import Detokenizer
from jax_w4a8.models.loading import read_plan
from jax_w4a8.models.text import encode, load_tokenizer
from jax_w4a8.weights import pack_linear
from tests.checkpoints import DATA, float_model
from tests.reference import random_weights

FAMILIES = tuple(sorted(path.name for path in DATA.glob("tiny-*")))
SHARD, INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"
#: Files of a checkpoint directory; ``header`` is that of ``model.safetensors``, whose values stay.
FILES = ("config.json", "header", "model.safetensors", INDEX, "generation_config.json")


@functools.cache
def scratch() -> Path:
    """A directory in memory, where there is one."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="jax_w4a8_fuzz_", dir=memory if memory.is_dir() else None))


@functools.cache
def _base(number: int) -> tuple[Path, dict[str, bytes]]:
    """A checkpoint directory of its own, and what its files hold."""
    source = DATA / FAMILIES[number % len(FAMILIES)]
    directory = scratch() / source.name
    directory.mkdir(exist_ok=True)
    whole = (source / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    names = [name for name in json.loads(whole[8:length]) if name != "__metadata__"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}
    return directory, {
        "config.json": (source / "config.json").read_bytes(),
        "header": whole[8:length],
        "model.safetensors": whole,
        INDEX: json.dumps(index).encode(),
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
    }


def _lay_out(directory: Path, content: dict[str, bytes], file: str, data: bytes) -> None:
    """The directory with ``data`` as its file ``file``."""
    whole = content["model.safetensors"]
    if file == "header":
        values = whole[8 + len(content["header"]) :]
        whole = len(data).to_bytes(8, "little") + data + values
    files = {name: content[name] for name in ("config.json", "generation_config.json")}
    files[SHARD if file == INDEX else "model.safetensors"] = whole
    if file != "header":
        files[file] = data
    for name in {*FILES, SHARD} - files.keys():
        (directory / name).unlink(missing_ok=True)
    for name, bytes_ in files.items():
        (directory / name).write_bytes(bytes_)


def read_everything(path: Path) -> None:
    """Plans a model and reads all of its tensors, as loading does."""
    config, plan = read_plan(path, allow_float=True)
    for attention in set(config.attentions):
        assert np.isfinite(attention.rotary.frequencies()).all()
    for module in plan.modules():
        if hasattr(module, "read_whole"):
            module.read_whole(lambda nbytes: None)
        elif module.scheme is None:
            module.read_float()
        else:
            module.read()


def read_directory(data: bytes) -> None:
    """A checkpoint directory with one damaged file."""
    directory, content = _base(data[0] if data else 0)
    file = FILES[data[1] % len(FILES)] if len(data) > 1 else FILES[0]
    _lay_out(directory, content, file, data[2:])
    with contextlib.suppress(CheckpointError):
        read_everything(directory)


def _as_file(name: str, data: bytes) -> Path:
    file = scratch() / name
    file.write_bytes(data)
    return file


def read_gguf(data: bytes) -> None:
    """A GGUF file: as a model and as a tokenizer."""
    file = _as_file("model.gguf", data)
    for read in (read_everything, load_tokenizer):
        with contextlib.suppress(CheckpointError):
            read(file)


_SOURCE = {"n": 1}


def read_packed(data: bytes) -> None:
    """A file of the cache of packed weights."""
    file = _as_file("cache.packed.safetensors", data)
    with contextlib.suppress(UnusableFileError):
        read_packed_file(file, _SOURCE, verify=True)


def read_tokenizer(data: bytes) -> None:
    """A ``tokenizer.json``, which then encodes and decodes."""
    directory = scratch() / "tokenizer"
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_bytes(data)
    try:
        tokenizer = load_tokenizer(directory)
        pieces = Detokenizer(tokenizer)
        for token in encode(tokenizer, "And it came to pass, 1 2 3"):
            pieces.add(token)
        pieces.finish()
    except ValueError:
        pass


_MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def read_chat_template(data: bytes) -> None:
    """A chat template in either of its files, which then renders."""
    directory = scratch() / "chat"
    directory.mkdir(exist_ok=True)
    files = ("chat_template.jinja", "tokenizer_config.json")
    for number, name in enumerate(files):
        (directory / name).unlink(missing_ok=True)
        if number == (data[0] % 2 if data else 0):
            (directory / name).write_bytes(data[1:])
    with contextlib.suppress(ValueError):
        ChatTemplate.load(directory).render(_MESSAGES)


# ---------------------------------------------------------------------------------------------------------
# What fuzzing starts from: whole files.


def _directory_seeds() -> Iterator[bytes]:
    for number in range(len(FAMILIES)):
        content = _base(number)[1]
        for kind, file in enumerate(FILES):
            yield bytes([number, kind]) + content[file]


def write_gguf_seed(file: Path, *, tokenizer: bool) -> Path:
    """A small GGUF file, with a tokenizer or without."""
    from tests.test_gguf import Types, write_gguf

    def metadata(writer: Any) -> None:
        if not tokenizer:
            return
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "b", "c", "ab", "abc", "<end>"])
        writer.add_token_types([1, 1, 1, 1, 4, 3])
        writer.add_token_merges(["a b", "ab c"])
        writer.add_eos_token_id(5)

    source = float_model(scratch() / "gguf_source", vocabulary=32, layers=1)
    write_gguf(file, source, metadata=metadata, quantized={"output": Types.Q8_0})
    return file


def _gguf_seeds() -> Iterator[bytes]:
    for tokenizer in (False, True):
        yield write_gguf_seed(scratch() / "seed.gguf", tokenizer=tokenizer).read_bytes()


def _packed_seeds() -> Iterator[bytes]:
    weights = pack_linear(random_weights(np.random.default_rng(0), (7, 33), 32))
    file = scratch() / "seed.packed.safetensors"
    write_packed_file(file, _SOURCE, {"linear": (weights, None), "norm": np.ones(7, np.float32)})
    yield file.read_bytes()


def _tokenizer_seeds() -> Iterator[bytes]:
    whole = json.loads((default_model_path() / "tokenizer.json").read_text())
    model = whole["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 300}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    yield json.dumps(whole).encode()


def _template_seeds() -> Iterator[bytes]:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] | trim }}]"
        "{% else %}{{ m.content | tojson }}{% endif %}{{ loop.index * 2 }}{% endfor %}"
        "{% macro f(x) %}{{ x | upper }}{% endmacro %}{{ f('a') }}{% set ns = namespace(n=0) %}"
        "{{ raise_exception('no') if false }}{{ strftime_now('%Y') }}"
    )
    yield b"\0" + template.encode()
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    yield b"\1" + json.dumps(config).encode()
    config["chat_template"] = [{"name": "default", "template": template}]
    yield b"\1" + json.dumps(config).encode()


Target = Callable[[bytes], None]
#: Each target with what fuzzing it starts from.
TARGETS: dict[str, tuple[Target, Callable[[], Iterator[bytes]]]] = {
    "directory": (read_directory, _directory_seeds),
    "gguf": (read_gguf, _gguf_seeds),
    "packed": (read_packed, _packed_seeds),
    "tokenizer": (read_tokenizer, _tokenizer_seeds),
    "chat": (read_chat_template, _template_seeds),
}


def clean_up() -> None:
    """Removes the scratch directory."""
    shutil.rmtree(scratch(), ignore_errors=True)


def faulty(target: Target, data: bytes) -> Exception | None:
    """The exception that a target doesn't document, if one escapes."""
    try:
        target(data)
    except Exception as error:
        return error
    return None


def describe(value: Any) -> str:
    """A short text of any value."""
    text = repr(value)
    return text if len(text) < 300 else f"{text[:300]}..."
