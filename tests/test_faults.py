"""Faults put into real files and machines: a clear error or success, never a crash, a hang or half a file."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_w4a8.checkpoint import Checkpoint, CheckpointError, TensorFiles
from jax_w4a8.checkpoint.packed_file import UnusableFileError, read_packed_file, write_packed_file
from jax_w4a8.checkpoint.patterns import check_pattern
from jax_w4a8.checkpoint.quantizer import JOURNAL_FILE, QuantizeOptions, quantize_checkpoint
from jax_w4a8.checkpoint.writer import PARTIAL_SUFFIX, SafetensorsWriter, TensorSpec
from jax_w4a8.cli import main
from jax_w4a8.models import PackedCache, default_model_path, load_model, template_sandbox
from jax_w4a8.models.chat import ChatTemplate
from jax_w4a8.models.text import encode, load_tokenizer
from jax_w4a8.quantization import QuantizedTensor
from jax_w4a8.weights import pack_linear

from .checkpoints import DATA, float_model, random_model
from .fuzz.targets import read_everything, write_gguf_seed
from .reference import in_process, random_weights

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
OPTIONS = QuantizeOptions(32, max_shard_bytes=9000)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("faults") / "model", vocabulary=16)


@pytest.fixture
def model(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf")
    return write_gguf_seed(tmp_path_factory.mktemp("faults") / "model.gguf", tokenizer=True)


def header_of(content: bytes) -> tuple[int, dict]:
    """Bytes before the values, and the parsed header."""
    length = 8 + int.from_bytes(content[:8], "little")
    return length, json.loads(content[8:length])


def boundaries(content: bytes) -> list[int]:
    """Where the parts of a safetensors file begin and end, and a byte before and behind."""
    start, header = header_of(content)
    ends = {0, 8, start, len(content)}
    for name, tensor in header.items():
        if name != "__metadata__":
            ends |= {start + offset for offset in tensor["data_offsets"]}
    return sorted({end + d for end in ends for d in (-1, 0, 1)} & set(range(len(content))))


def refused(path: Path, *names: str) -> str:
    """The message, which must name one of these files."""
    with pytest.raises(CheckpointError) as caught:
        read_everything(path)
    assert any(name in str(caught.value) for name in names or (MODEL,)), caught.value
    return str(caught.value)


def survives(path: Path, *names: str, read: Callable[[Path], object] = read_everything) -> bool:
    """Whether a damaged file is read as if it were whole; otherwise it is refused by one of these names."""
    try:
        read(path)
    except CheckpointError as error:
        message = str(error)
    else:
        return True
    assert any(name in message for name in names), message
    return False


@contextlib.contextmanager
def limited(kind: int, value: int):
    """A soft limit of this process, for a while."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextlib.contextmanager
def little_memory(limit: int = 8 << 20):
    """Python and numpy may take at most ``limit`` bytes meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------------
# Files that end early, and bits that fell over.


def test_tensors_cut_at_every_boundary(model):
    content = (model / MODEL).read_bytes()
    cuts = boundaries(content)
    assert len(cuts) > 60
    for cut in cuts:
        (model / MODEL).write_bytes(content[:cut])
        refused(model)
    (model / MODEL).write_bytes(content + b"\0")
    refused(model)


@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_json_cut_at_every_byte(model, file):
    if file == INDEX:
        content = (model / MODEL).read_bytes()
        names = [name for name in header_of(content)[1] if name != "__metadata__"]
        (model / MODEL).rename(model / "shard.safetensors")
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "shard.safetensors")}))
        read_everything(model)
    content = (model / file).read_bytes()
    for cut in range(0, len(content), 3):
        (model / file).write_bytes(content[:cut])
        refused(model, file)


def flipped(content: bytes, bit: int) -> bytes:
    result = bytearray(content)
    result[bit // 8] ^= 1 << bit % 8
    return bytes(result)


def test_flipped_bits_of_a_header(model):
    """All bits of the length, and a tenth of the header's."""
    content = (model / MODEL).read_bytes()
    bits = [*range(64), *range(64, 8 * header_of(content)[0], 37)]
    noticed = 0
    for bit in bits:
        (model / MODEL).write_bytes(flipped(content, bit))
        noticed += not survives(model, MODEL, str(model))
    assert noticed > 0.9 * len(bits)  # some bits mean nothing, as in the file's metadata


def test_flipped_bits_of_values_change_numbers_and_nothing_else(model):
    """safetensors files have no checksums."""
    content, rng = (model / MODEL).read_bytes(), random.Random(0)
    start = 8 * header_of(content)[0]
    for _ in range(60):
        (model / MODEL).write_bytes(flipped(content, rng.randrange(start, 8 * len(content))))
        survives(model, "tensor '")  # or a number became NaN, or a weight_shape another


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_gguf(gguf_file, tmp_path, damage):
    content, rng = gguf_file.read_bytes(), random.Random(1)
    file = tmp_path / "damaged.gguf"
    for _ in range(150):
        at = rng.randrange(min(3000, len(content)) if rng.random() < 0.7 else len(content))
        file.write_bytes(content[:at] if damage == "cut" else flipped(content, 8 * at + rng.randrange(8)))
        for read in (read_everything, load_tokenizer):
            survives(file, "damaged.gguf", "tensor", "module", read=read)


PACKED = {
    "linear": (pack_linear(random_weights(np.random.default_rng(0), (7, 33), 32)), None),
    "norm": np.ones(7, np.float32),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    file = tmp_path_factory.mktemp("faults") / "cache"
    write_packed_file(file, {"n": 1}, PACKED)
    return file.read_bytes()


def unusable(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UnusableFileError):
        read_packed_file(file, {"n": 1}, verify=True)


def test_a_packed_file_cut_or_flipped_anywhere_is_not_used(packed, tmp_path):
    file = tmp_path / "cache"
    for cut in boundaries(packed):
        unusable(file, packed[:cut])
    start, header = header_of(packed)
    padding = [t["data_offsets"] for name, t in header.items() if name.startswith("padding.")]
    rng = random.Random(2)
    for _ in range(300):
        bit = rng.randrange(8 * len(packed))
        if not any(begin <= bit // 8 - start < end for begin, end in padding):
            unusable(file, flipped(packed, bit))
    file.write_bytes(packed)
    read_packed_file(file, {"n": 1}, verify=True)


def test_a_packed_file_that_says_what_it_must_not(packed, tmp_path):
    start, header = header_of(packed)
    for name, value in [
        ("sha256", []),
        ("norm", {"data_offsets": []}),
        ("norm", {"dtype": "F32", "shape": [7], "data_offsets": [0, "x"]}),
        ("norm", {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 28]}),
        ("__metadata__", None),
    ]:
        text = json.dumps({**header, name: value}).encode()
        unusable(tmp_path / "cache", len(text).to_bytes(8, "little") + text + packed[start:])
    deep = b"[" * 200_000
    unusable(tmp_path / "cache", len(deep).to_bytes(8, "little") + deep)
    unusable(tmp_path / "cache", (2**63).to_bytes(8, "little") + deep)


# ---------------------------------------------------------------------------------------------------------
# Files that are missing, too many, or something else.


def test_a_shard_that_is_no_file(model):
    content = (model / MODEL).read_bytes()
    names = [name for name in header_of(content)[1] if name != "__metadata__"]
    (model / MODEL).unlink()
    for shard in ("gone.safetensors", "a\0b", "x" * 5000, "\ud800", "folder"):
        (model / "folder").mkdir(exist_ok=True)
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
        assert "is missing" in refused(model, INDEX)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "C:x", "\\\\host\\share", "..\\x", "", None, 3],
)
def test_a_shard_that_lies_elsewhere(model, shard):
    (model / MODEL).rename(model.parent / "x.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    message = refused(model, INDEX)
    assert "lies outside the checkpoint's directory" in message or "must be a file name" in message


@pytest.mark.parametrize("file", ["config.json", MODEL])
@pytest.mark.parametrize("kind", ["folder", "empty", "pipe", "device", "loop", "not text"])
def test_something_else_in_the_place_of_a_file(model, file, kind):
    path = model / file
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "loop"):
        path.symlink_to("/dev/zero" if kind == "device" else path)
    else:
        path.write_bytes(b"" if kind == "empty" else b"\xff\xfe{}" * 9)
    refused(model, file, "holds no .safetensors file")


def test_checkpoints_of_symbolic_links(model, original, tmp_path):
    """Hugging Face's cache is made of them."""
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    shutil.move(model, blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    read_everything(snapshot)
    files, expected = TensorFiles(snapshot), TensorFiles(original)
    for name in expected.headers:
        assert np.array_equal(files.read(name), expected.read(name))


# ---------------------------------------------------------------------------------------------------------
# Headers and configurations that lie.


def entry(start, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "overlap": {"a": entry(0, 8, [2]), "b": entry(4, 8, [1])},
    "hole": {"a": entry(0, 4, [1]), "b": entry(8, 12, [1])},
    "backwards": {"a": entry(4, 0, [1])},
    "beyond": {"a": entry(0, 2**40, [2**38])},
    "shape and offsets": {"a": entry(0, 8, [3])},
    "dtype and offsets": {"a": entry(0, 8, [2], "BF16")},
    "negative": {"a": entry(0, 8, [-2])},
    "overflow": {"a": entry(0, 8, [2**62, 4])},
    "no such dtype": {"a": entry(0, 8, [2], "Q9")},
    "no entry": {"a": 3},
    "text": b"model",
    "twice": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "deep": b'{"a":' + b"[" * 100_000,
    "not UTF-8": b'{"\xff":{}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie(model, case):
    header = HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (model / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with little_memory():
        refused(model)


@pytest.mark.parametrize("length", [10**8 - 1, 10**8 + 1, 2**40, 2**63, 2**64 - 1])
def test_headers_of_absurd_length(model, length):
    (model / MODEL).write_bytes(length.to_bytes(8, "little") + b"{}" * 100)
    with little_memory():
        refused(model)


CONFIGS = {
    "num_hidden_layers": [2**31 - 1, 2**31, 10**300, -1, 0, 1.5, True, "1", [1], float("inf")],
    "num_local_experts": [2**31 - 1, 10**300, 0, {}],
    "num_experts_per_tok": [2**31 - 1, 3, 0],
    "hidden_size": [2**31 - 1, 2**62, 0],
    "vocab_size": [2**31 - 1, 10**300],
    "head_dim": [2**31 - 2, 31],
    "num_attention_heads": [2**31 - 1, 3],
    "rms_norm_eps": [float("nan"), float("inf"), 0, -1, 10**400, "x"],
    "hidden_act": [[], {}, None, "x", 3],
    "layer_types": [{}, [[]], ["full_attention"] * 2],
    "rope_parameters": [
        [],
        {"rope_type": []},
        {"rope_theta": float("nan")},
        {"rope_theta": 1e-300},
        {"rope_type": "yarn", "factor": 1e308},
        {"rope_type": "linear", "factor": float("inf")},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e308},
        {"rope_type": "yarn", "factor": 2.0, "mscale": 1e308, "mscale_all_dim": 1.0},
    ],
    "model_type": [[], {}, "x" * 100_000],
    "eos_token_id": [2**40, [-1], "x"],
    "max_position_embeddings": [0, 2**40, "x"],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_configurations_that_lie(model, field):
    config = json.loads((model / "config.json").read_text())
    for value in CONFIGS[field]:
        (model / "config.json").write_text(json.dumps({**config, field: value}))
        with little_memory():
            message = refused(model, "config.json", MODEL, "tensor '", "module '")
        assert len(message) < 5000, "values of any length are shortened"
    (model / "config.json").write_text(json.dumps(config))
    read_everything(model)


def test_prediction_layers_are_counted_first(tmp_path):
    model = Path(shutil.copytree(DATA / "tiny-deepseek_v3", tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2**31 - 1}))
    assert "at most the number of tensors" in refused(model, "config.json")


def test_a_name_twice(model):
    text = (model / "config.json").read_text()
    again = text.replace('"hidden_size": 64', '"hidden_size": 64, "hidden_size": %d')
    assert again != text
    (model / "config.json").write_text(again % 64)
    read_everything(model)
    (model / "config.json").write_text(again % 128)
    assert "'hidden_size' is there twice" in refused(model, "config.json")


def test_huge_and_deep_json(model):
    with (model / "config.json").open("wb") as file:
        file.truncate(200_000_000)
    with little_memory():
        assert "larger than any JSON" in refused(model, "config.json")
    for text in ('{"a":' * 100_000, "[" * 100_000 + "]" * 100_000):
        (model / "config.json").write_text(text)
        assert "can't be read as JSON" in refused(model, "config.json")


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_start(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


GGUF = {
    "tensors": gguf_start(2**60, 0) + bytes(100),
    "keys": gguf_start(0, 2**60) + bytes(100),
    "a key's length": gguf_start(0, 1) + struct.pack("<Q", 2**60) + bytes(100),
    "an array's length": gguf_start(0, 1) + gguf_string("a") + struct.pack("<IIQ", 9, 0, 2**60) + bytes(50),
    "an array of texts": gguf_start(0, 1) + gguf_string("a") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(50),
    "arrays of arrays": gguf_start(0, 1) + gguf_string("a") + struct.pack("<IIQ", 9, 9, 1) * 1000,
    "a type": gguf_start(0, 1) + gguf_string("a") + struct.pack("<I", 77) + bytes(50),
    "axes": gguf_start(1, 0) + gguf_string("a") + struct.pack("<I", 2**31) + bytes(100),
    "no rows": gguf_start(1, 0) + gguf_string("a") + struct.pack("<IQQIQ", 2, 0, 2**40, 0, 0) + bytes(50),
    "a shape": gguf_start(1, 0) + gguf_string("a") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(50),
    "an offset": gguf_start(1, 0) + gguf_string("a") + struct.pack("<IQIQ", 1, 1, 0, 2**60) + bytes(50),
    "a version": gguf_start(0, 0, 9),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "not UTF-8": gguf_start(0, 1) + gguf_string(b"\xff") + struct.pack("<IB", 7, 1),
    "a key twice": gguf_start(0, 2) + (gguf_string("a") + struct.pack("<IB", 7, 1)) * 2,
    "nothing": b"",
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf_files_that_lie(tmp_path, case):
    pytest.importorskip("gguf")
    file = tmp_path / "lie.gguf"
    file.write_bytes(GGUF[case])
    begin = time.process_time()
    with little_memory():
        assert "is not a complete GGUF file" in refused(file, "lie.gguf")
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**31 - 1),
        ("embedding_length", 0),
        ("attention.head_count", 0),
        ("expert_count", 2**30),
    ],
)
def test_gguf_metadata_that_lie(gguf_file, tmp_path, key, value):
    content = gguf_file.read_bytes()
    at = content.index(gguf_string(f"qwen3moe.{key}")) + 8 + len(f"qwen3moe.{key}") + 4
    file = tmp_path / "lie.gguf"
    file.write_bytes(content[:at] + struct.pack("<I", value) + content[at + 4 :])
    with little_memory():
        refused(file, key, "lie.gguf")


# ---------------------------------------------------------------------------------------------------------
# Programs that come with a checkpoint.


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(.*)*x",
        "(?:a|a)*$",
        "(a{1,9}){1,9}$",
        r"(\w+\.?)+!",
        ".*" * 9 + "x",
        "a" * 1001,
        "(" * 5000,
        "(",
        "a{9}{",
    ],
)
def test_expressions_that_match_for_ever_are_refused(model, pattern):
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["ignore"].append(f"re:{pattern}")
    (model / "config.json").write_text(json.dumps(config))
    begin = time.process_time()
    if pattern == "a{9}{":  # braces that repeat nothing are plain characters
        read_everything(model)
    else:
        refused(model, "config.json")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "pattern",
    [
        r".*[.]gate$",
        r"^(?!.*mlp\.experts).*",
        r".*router([.].*)?$",
        r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj",
        r".*\)+[)*+]+x{2}\*",
        r"(?P<kind>vision|audio)_.*",
    ],
)
def test_expressions_that_people_write_are_taken(pattern):
    check_pattern(pattern, "ignore")


MESSAGES = [{"role": "user", "content": "Hello"}]


def render(source: str) -> str:
    return ChatTemplate(source, {}, "template").render(MESSAGES)


TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "range": "{{ range(10 ** 9) | list }}",
    "texts": "{{ 'a' * 10000000000 }}",
    "lists": "{{ 9999999999 * [1] }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "numbers": "{{ 9 ** 99999999 }}",
    "widths": "{{ '%99999999999d' % 1 }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "changes": "{{ messages.append(1) }}",
    "files": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}",
    "types": "{{ 1 + messages }}",
    "division": "{{ 1 / 0 }}",
    "json": "{{ missing | tojson }}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_end_and_stay_inside(case, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.5)
    begin = time.process_time()
    with pytest.raises(ValueError, match="the chat template template: "):
        render(TEMPLATES[case])
    assert time.process_time() - begin < 5


def test_templates_reach_nothing_of_python_s():
    pytest.importorskip("jinja2")
    for name in ("raise_exception", "strftime_now"):
        for attribute in ("__globals__", "__code__", "__closure__"):
            assert render(f"{{{{ {name}.{attribute} }}}}") == ""
    with pytest.raises(CheckpointError, match="template is no template"):
        render("{{ " + "(" * 900 + "1" + ")" * 900 + " }}")
    with pytest.raises(CheckpointError, match="template is no template"):
        render("{% if 1 %}" * 150 + "{% endif %}" * 150)


@pytest.mark.parametrize("value", [3, True, [3], [{"name": [], "template": "x"}], [{"name": "default"}], {}])
def test_chat_templates_of_wrong_types(tmp_path, value):
    pytest.importorskip("jinja2")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template must be"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja can't be read as text"):
        ChatTemplate.load(tmp_path)


def test_damaged_tokenizers(tmp_path):
    content = (default_model_path() / "tokenizer.json").read_bytes()
    for damaged in (b"", b"{", b"[]", b"\xff" * 99, content[:-1], content[:1000], b'{"a":' * 9999):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read as a tokenizer"):
            load_tokenizer(tmp_path)


def test_a_tokenizer_s_settings_for_batches_touch_no_prompt(tmp_path):
    content = json.loads((default_model_path() / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    prompt = "And it came to pass in those days"
    expected = encode(load_tokenizer(default_model_path()), prompt)
    assert len(expected) > 3
    assert encode(load_tokenizer(tmp_path), prompt) == expected


# ---------------------------------------------------------------------------------------------------------
# Disks that are full or can't be written to, memory that ends.


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A floating point source, and what the quantiser makes of it undisturbed."""
    root = tmp_path_factory.mktemp("faults")
    source = float_model(root / "source", layers=1)
    quantize_checkpoint(source, root / "whole", OPTIONS)
    return source, {file.name: file.read_bytes() for file in (root / "whole").iterdir()}


@pytest.mark.parametrize("size", [0, 1, 100, 3000, 8000])
def test_a_disk_that_is_full_while_quantising(quantised, tmp_path, size):
    """No file may become longer than ``size``, as on a full disk; then there is space again."""
    source, whole = quantised
    out = tmp_path / "out"
    with limited(resource.RLIMIT_FSIZE, size), pytest.raises(OSError, match="File too large"):
        quantize_checkpoint(source, out, OPTIONS)
    for file in out.iterdir():  # whatever has its name is whole
        assert file.name == JOURNAL_FILE or file.read_bytes() == whole[file.name]
        assert not file.name.endswith(PARTIAL_SUFFIX)
    assert not (out / "config.json").exists()
    quantize_checkpoint(source, out, OPTIONS)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == whole


def test_a_writer_that_cannot_begin_leaves_nothing(tmp_path):
    with limited(resource.RLIMIT_FSIZE, 10), pytest.raises(OSError, match="File too large"):
        SafetensorsWriter(tmp_path / "x.safetensors", [TensorSpec("a", (2,), "F32")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_disk_that_is_full_while_caching(packed, tmp_path, size):
    file = tmp_path / "cache"
    for before in (None, packed):
        with limited(resource.RLIMIT_FSIZE, size), pytest.raises(OSError, match="File too large"):
            write_packed_file(file, {"n": 2}, PACKED)
        assert [other.read_bytes() for other in tmp_path.iterdir()] == ([] if before is None else [before])
        file.write_bytes(packed)


def test_a_cache_directory_that_cannot_be_written_to(model, caplog):
    """Nobody can make files in /proc, root included."""
    if not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    loaded = load_model(model, packed_cache=PackedCache("/proc/jax_w4a8"))
    assert "packed weights were not cached" in caplog.text
    expected = jax.tree.leaves(load_model(model))
    for a, b in zip(jax.tree.leaves(loaded), expected, strict=True):
        assert np.array_equal(a, b)


def little_memory_left() -> None:
    """Reads and packs with more memory until it works; prints what happened (in its own process)."""
    directory = Path(os.environ["CHECKPOINT"])
    read_everything(random_model(directory / "small"))  # all threads and tables are there now
    codes = np.zeros((4096, 4096), np.int8)
    weights = QuantizedTensor(codes, np.ones((4096, 128), np.float32), 32)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for extra in (0, 1, 4, 16, 512):
        for what, run in (
            ("read", lambda: read_everything(directory / "large")),
            ("pack", lambda: pack_linear(weights)),
        ):
            try:
                with limited(resource.RLIMIT_AS, pages + (extra << 20)):
                    run()
                print(what, extra, "done")
            except (MemoryError, OSError, RuntimeError, CheckpointError) as error:
                said = any(word in str(error).lower() for word in ("memory", "alloc", "thread"))
                print(what, extra, "refused" if said else repr(error))


def test_memory_that_ends_while_reading_and_packing(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("looks into /proc")
    random_model(tmp_path / "large", hidden=1024, intermediate=1024, vocabulary=1024)
    printed = in_process(little_memory_left, CHECKPOINT=str(tmp_path)).split("\n")
    assert {"read 0 refused", "pack 0 refused", "read 512 done", "pack 512 done"} <= set(printed), printed


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from jax_w4a8.checkpoint.packed_file import read_packed_file, write_packed_file

path, moments = Path(sys.argv[1]), random.Random(0)
values = {n: np.full(1 << 22, n, np.uint8) for n in range(2)}
seen = 0

def write(number):
    child = os.fork()
    if child == 0:
        write_packed_file(path, {"n": 1}, {"value": values[number % 2]})
        os._exit(0)
    return child

start = time.monotonic()
os.waitpid(write(0), 0)
takes = time.monotonic() - start
for number in range(40):
    child = write(number)
    time.sleep(moments.uniform(0, takes))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if path.exists():
        (one,) = set(read_packed_file(path, {"n": 1}, verify=True)["value"][:: 1 << 12])
        seen += 1
assert list(path.parent.glob("*.tmp")), "no writer was killed while it wrote"
write_packed_file(path, {"n": 1}, {"value": values[1]})
assert read_packed_file(path, {"n": 1}, verify=True)["value"].all()
print(seen)
"""


def test_forty_kills_while_caching_leave_whole_files(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, tmp_path / "cache" / "file"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


# ---------------------------------------------------------------------------------------------------------
# What a person sees.


def test_the_command_line_says_it_in_one_line(model, tmp_path, capsys):
    for name, content in {
        "config.json": b'{"a":' * 100_000,
        MODEL: (2**60).to_bytes(8, "little"),
    }.items():
        damaged = Path(shutil.copytree(model, tmp_path / name))
        (damaged / name).write_bytes(content)
        assert main(["info", str(damaged)]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ")
        assert printed.err.count("\n") == 1
        assert name in printed.err


def read_until_signalled(path: Path, moment: float) -> None:
    """The signal comes after so many seconds, and again: Python drops what a weak reference's end raises."""
    try:
        signal.setitimer(signal.ITIMER_REAL, moment, 2.0)
        while True:
            read_everything(path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_an_interrupted_reader_leaves_a_usable_process(model):
    """A signal between two tensors, as Ctrl-C sends it."""
    files = Checkpoint(model).files
    whole = {name: files.read(name) for name in files.headers}

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for moment in (0.0005, 0.002, 0.005):
            # Code in C that an interrupt meets may report it as an error of its own.
            with pytest.raises((KeyboardInterrupt, SystemError)):
                read_until_signalled(model, moment)
    finally:
        signal.signal(signal.SIGALRM, before)
    for name, value in whole.items():
        assert np.array_equal(files.read(name), value)
    read_everything(model)
