"""The cache of packed models: equal to what it was made from, and never trusted further than it can be."""

import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jax_w4a8 import cli
from jax_w4a8.checkpoint import packed_file
from jax_w4a8.checkpoint.packed_file import UnusableFileError, read_packed_file, write_packed_file
from jax_w4a8.checkpoint.tensors import TensorFiles
from jax_w4a8.models import PackedCache, default_model_path, load_model
from jax_w4a8.weights import pack_experts, pack_linear

from .checkpoints import DATA, edited
from .reference import assert_same_bits, random_layer, random_weights

SOURCE = DATA / "qwen3_moe-g32-pack"


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of a checkpoint, and a directory for its cache."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in SOURCE.iterdir():
        if file.name != "reference.npz":
            shutil.copy(file, copy)
    return copy, tmp_path / "cache"


def assert_same_models(first, second):
    a, b = jax.tree.leaves(first), jax.tree.leaves(second)
    assert len(a) == len(b) > 20
    for one, other in zip(a, b, strict=True):
        assert_same_bits(one, other)


@pytest.fixture
def no_reading(monkeypatch):
    """Calling the result makes every read of a checkpoint's tensors fail."""

    def refuse(self, name, rows):
        raise AssertionError(f"{name} was read")

    return lambda: monkeypatch.setattr(TensorFiles, "_read_piece", refuse)


def only_file(directory):
    (file,) = directory.iterdir()
    return file


def notes(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------------------------------------------------
# Loading.


def test_a_second_load_reads_no_tensor_and_equals_the_first(checkpoint, no_reading, caplog):  # [F9]
    path, cache = checkpoint
    first = load_model(path, packed_cache=cache)
    assert_same_models(first, load_model(path))
    no_reading()
    seen = []
    second = load_model(
        path, packed_cache=str(cache), progress=lambda done, total: seen.append((done, total))
    )
    assert_same_models(first, second)
    assert seen[-1][0] == seen[-1][1]
    tokens = np.array([[1, 2, 3]])
    assert_same_bits(first(tokens), second(tokens))
    load_model(path, packed_cache=PackedCache(cache, verify=True))
    assert notes(caplog) == []
    with pytest.raises(AssertionError, match="was read"):
        load_model(path)


def test_mapped_weights_are_taken_over_without_a_copy(checkpoint):
    path, cache = checkpoint
    load_model(path, packed_cache=cache)
    if jax.default_backend() != "cpu" or not sys.platform.startswith("linux"):
        pytest.skip("looks at memory maps")
    model = load_model(path, packed_cache=cache)
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [line for line in maps if str(only_file(cache)) in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in places]
    for leaf in jax.tree.leaves(model):
        at = leaf.unsafe_buffer_pointer()
        assert any(begin <= at < end for begin, end in ranges)


def test_the_user_s_cache_directory(checkpoint, monkeypatch, no_reading, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path, _ = checkpoint
    first = load_model(path, packed_cache=True)
    assert only_file(tmp_path / "home" / "jax_w4a8").name.startswith("model-")
    no_reading()
    assert_same_models(first, load_model(path, packed_cache=PackedCache()))


def test_two_checkpoints_share_a_directory(checkpoint, tmp_path):
    path, cache = checkpoint
    other = edited(tmp_path / "other" / "model", tensors=lambda t: t.update(zeroed(t, "model.norm.weight")))
    models = load_model(path, packed_cache=cache), load_model(other, packed_cache=cache)
    assert len(list(cache.iterdir())) == 2
    for where, model in zip((path, other), models, strict=True):
        assert_same_models(load_model(where, packed_cache=cache), model)


def zeroed(tensors, name):
    return {name: np.zeros_like(tensors[name])}


def test_command_line(checkpoint, capsys, no_reading):
    _, cache = checkpoint
    words = ["generate", "--max-new-tokens", "2", "--json", "--packed-cache", str(cache)]
    assert cli.main(words) == 0
    first = json.loads(capsys.readouterr().out)
    assert only_file(cache).name.startswith(default_model_path().name)
    no_reading()
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == first["ids"]


def test_what_a_cache_may_be(checkpoint):
    path, _ = checkpoint
    with pytest.raises(TypeError, match="packed_cache must be a directory, a bool or a PackedCache, got int"):
        load_model(path, packed_cache=3)
    assert_same_models(load_model(path, packed_cache=False), load_model(path, packed_cache=None))


# ---------------------------------------------------------------------------------------------------------
# What isn't trusted is built anew, with a note.


def touch(path, cache):
    status = (path / "model.safetensors").stat()
    os.utime(path / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def change_config(path, cache):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config, indent=3))


def change_tensors(path, cache):
    edited(path, tensors=lambda t: t.update(zeroed(t, "model.norm.weight")))


def truncate(path, cache):
    file = only_file(cache)
    os.truncate(file, file.stat().st_size - 1)


def lengthen(path, cache):
    with only_file(cache).open("ab") as file:
        file.write(b"more")


def empty(path, cache):
    only_file(cache).write_bytes(b"")


def cut_to_a_few_bytes(path, cache):
    os.truncate(only_file(cache), 5)


def replace_by_text(path, cache):
    only_file(cache).write_text("no packed weights at all, but a text of some length")


def replace_by_another_safetensors_file(path, cache):
    shutil.copy(path / "model.safetensors", only_file(cache))


def flip_in_header(path, cache):
    flip(only_file(cache), 200)


def age_layout(path, cache):
    replace_bytes(only_file(cache), b'"layout_version": "1"', b'"layout_version": "0"')


def flip(file, offset):
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def replace_bytes(file, old, new):
    """In the header, whose digest is made good."""
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    assert old in data[:length]
    header = data[:length].replace(old, new)
    stored = packed_file.hashlib.sha256(data[:length]).digest()
    rest = data[length:].replace(stored, packed_file.hashlib.sha256(header).digest())
    file.write_bytes(header + rest)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (touch, "has changed"),
        (change_config, "has changed"),
        (change_tensors, "has changed"),
        (truncate, "where its header promises"),
        (lengthen, "where its header promises"),
        (empty, "can't be mapped"),
        (cut_to_a_few_bytes, "truncated, or no such file"),
        (replace_by_text, "truncated, or no such file"),
        (replace_by_another_safetensors_file, "no file of packed modules"),
        (flip_in_header, "damaged|no file of packed modules"),
        (age_layout, "its layout version is 0, and this package has 1"),
    ],
)
def test_rebuilt_with_a_note(checkpoint, damage, reason, caplog, no_reading):
    path, cache = checkpoint
    load_model(path, packed_cache=cache)
    damage(path, cache)
    second = load_model(path, packed_cache=cache)
    (note,) = notes(caplog)
    assert "built anew" in note
    assert str(cache) in note
    assert re.search(reason, note), note
    assert_same_models(second, load_model(path))
    no_reading()
    assert_same_models(second, load_model(path, packed_cache=cache))
    assert len(notes(caplog)) == 1


def test_a_cache_without_one_of_the_modules(checkpoint, monkeypatch, caplog):
    path, cache = checkpoint
    first = load_model(path, packed_cache=cache)
    real = packed_file.read_packed_file

    def without_norm(*arguments, **keywords):
        modules = real(*arguments, **keywords)
        del modules["model.norm.weight"]
        return modules

    monkeypatch.setattr("jax_w4a8.models.packed_cache.read_packed_file", without_norm)
    assert_same_models(first, load_model(path, packed_cache=cache))
    assert "has no module 'model.norm.weight'" in notes(caplog)[0]


def test_damaged_data_is_found_on_request(checkpoint, caplog):
    path, cache = checkpoint
    first = load_model(path, packed_cache=cache)
    file = only_file(cache)
    flip(file, file.stat().st_size // 2)
    second = load_model(path, packed_cache=PackedCache(cache, verify=True))
    assert_same_models(first, second)
    assert "is damaged" in notes(caplog)[0]


# ---------------------------------------------------------------------------------------------------------
# Writing.


def test_a_directory_that_cannot_be_made(checkpoint, tmp_path, caplog):
    path, _ = checkpoint
    (tmp_path / "file").write_text("")
    model = load_model(path, packed_cache=tmp_path / "file" / "cache")
    assert_same_models(model, load_model(path))
    assert "packed weights were not cached" in notes(caplog)[0]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "denied")])
def test_a_full_or_read_only_directory(checkpoint, monkeypatch, caplog, error):
    path, cache = checkpoint

    def fail(descriptor):
        raise error

    monkeypatch.setattr(packed_file.os, "fsync", fail)
    model = load_model(path, packed_cache=cache)
    assert_same_models(model, load_model(path))
    assert f"packed weights were not cached: {error}" in notes(caplog)
    assert list(cache.iterdir()) == []


def test_abandoned_temporary_files_go(checkpoint):
    path, cache = checkpoint
    load_model(path, packed_cache=cache)
    file = only_file(cache)
    old, new = (file.with_name(f"{file.name}.1-{name}.tmp") for name in ("old", "new"))
    for other in (old, new):
        other.write_text("")
    os.utime(old, (0, 0))
    touch(path, cache)
    load_model(path, packed_cache=cache)
    assert sorted(cache.iterdir()) == sorted([file, new])


def write_many(path, seed, go):
    value = np.full(1 << 20, seed, np.uint8)
    go.wait()
    for _ in range(20):
        write_packed_file(path, {"n": 1}, {"value": value})


def test_two_writers_at_once(tmp_path):
    """A reader always finds one of the two whole files."""
    path = tmp_path / "cache" / "file"
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    writers = [context.Process(target=write_many, args=(path, seed, go)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    go.set()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        try:
            value = read_packed_file(path, {"n": 1}, verify=True)["value"]
        except FileNotFoundError:
            continue
        (one,) = set(value[:: 1 << 12])
        seen.add(int(one))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen <= {1, 2}
    assert seen
    assert list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------------------------------------------------
# The file itself.


def test_a_file_holds_what_it_was_given(tmp_path):
    layer = random_layer(4, 3, 100, 34, 32, biased=True)
    modules = {
        "experts": pack_experts(*layer),
        "linear": (pack_linear(random_weights(np.random.default_rng(0), (7, 33), 32)), None),
        "odd": np.arange(7, dtype=np.float16),
        "none": np.zeros((0, 3), np.float32),
        "scalar": np.float32(3),
    }
    file = tmp_path / "file.safetensors"
    write_packed_file(file, {"a": [1, 2]}, modules)
    read = read_packed_file(file, {"a": [1, 2]}, verify=True)
    assert jax.tree.structure(read) == jax.tree.structure(modules)
    for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(modules), strict=True):
        assert_same_bits(a, np.asarray(b))
        assert a.ctypes.data % 64 == 0 or not a.size
        assert not a.flags.writeable
    with safe_open(file, framework="numpy") as opened:  # other tools read it
        assert np.array_equal(opened.get_tensor("experts.w13.codes"), modules["experts"].w13.codes)
        assert opened.metadata()["format"] == "jax_w4a8 packed modules"
    with pytest.raises(UnusableFileError, match="the checkpoint has changed"):
        read_packed_file(file, {"a": [1, 3]})
    with pytest.raises(FileNotFoundError):
        read_packed_file(tmp_path / "nothing", {})


def test_another_process_reads_it(checkpoint):
    path, cache = checkpoint
    load_model(path, packed_cache=cache)
    before = only_file(cache).stat().st_mtime_ns
    code = "import sys, jax_w4a8.models as m; m.load_model(sys.argv[1], packed_cache=sys.argv[2])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), str(cache)], check=True, capture_output=True, text=True
    )
    assert "built anew" not in ran.stderr
    assert only_file(cache).stat().st_mtime_ns == before
