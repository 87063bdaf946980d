"""Text: characters and stop strings across tokens, chat templates, and the flags of ``generate``."""

from __future__ import annotations

import functools
import json
import shutil

import numpy as np
import pytest

from jax_w4a8.checkpoint import CheckpointError
from jax_w4a8.cli import main
from jax_w4a8.models import Sampling, default_model_path, load_model
from jax_w4a8.models.detokenizer import Detokenizer, StopStrings
from jax_w4a8.models.text import TextStream, generate_texts, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
PROMPT = "And it came to pass in those days, that"


@functools.cache
def tokenizer():
    return load_tokenizer(default_model_path())


@functools.cache
def model():
    return load_model(default_model_path(), "symmetric")


def pieces_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize(
    "text", ["And he said", "Über 日本 🙂, נֹחַ", " two  spaces\n\n", "a\N{REPLACEMENT CHARACTER}b"]
)
def test_pieces_are_whole_characters_and_make_up_the_text(text):
    ids = tokenizer().encode(text).ids
    pieces = pieces_of(tokenizer(), ids)
    assert "".join(pieces) == tokenizer().decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        assert "".join(pieces) == text


def test_a_character_cut_off_shows_at_the_end_alone():
    ids = tokenizer().encode("day 日").ids
    pieces = pieces_of(tokenizer(), ids[:-1])
    assert "".join(pieces[:-1]) == "day "
    assert set(pieces[-1]) == {"\N{REPLACEMENT CHARACTER}"}


def byte_fallback():
    """As in Llama's tokenizers: words begin with a block, and unknown characters are tokens of one byte."""
    words = ["<unk>", "▁the", "▁day", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True)
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def test_byte_tokens_wait_for_their_character():
    made = byte_fallback()
    ids = [1, 2, 3, *(4 + byte for byte in "é日".encode()), 1]
    pieces = pieces_of(made, ids)
    assert pieces == ["the", " day", "s", "", "é", "", "", "日", " the", ""]


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        ((), ["a", "b"], "ab", False),
        (("END",), ["so E", "N", "D of it"], "so ", True),
        (("END",), ["so E", "N", "ow"], "so ENow", False),
        (("END",), ["so EN"], "so EN", False),
        (("aab",), ["aa", "aab"], "aa", True),
        (("xyz", "b"), ["ab", "c"], "a", True),
        ("\n", ["one\ntwo"], "one", True),
        (("bc", "abcd"), ["abcd"], "", True),
    ],
)
def test_text_ends_before_a_stop_string(stops, pieces, text, found):
    stop = StopStrings(stops)
    given = [stop.add(piece) for piece in pieces]
    assert "".join([*given, stop.finish()]) == text
    assert stop.found == found


def test_bad_stop_strings_are_named():
    with pytest.raises(ValueError, match="stop_strings must not be empty"):
        StopStrings(["a", ""])
    with pytest.raises(TypeError, match="stop_strings must be strings, got 5"):
        StopStrings([5])


def test_a_stream_ends_before_a_stop_string():
    whole = "".join(TextStream(model(), tokenizer(), PROMPT, 24))
    assert whole.startswith(" the king of Israel came to the king")
    stream = TextStream(model(), tokenizer(), PROMPT, 24, stop_strings=["Israel came"])
    assert "".join(stream) == " the king of "
    assert stream.finish_reason == "stop"
    assert len(stream.ids) < 24
    short = TextStream(model(), tokenizer(), PROMPT, 2)
    assert whole.startswith("".join(short))
    assert short.finish_reason == "length"


def test_texts_of_a_batch_are_those_of_each_alone():
    prompts = [PROMPT, "The LORD", tokenizer().encode("And God said, Let there be").ids]
    options = {"sampling": Sampling(do_sample=True, top_p=0.9, seed=(3, 4, 5)), "stop_strings": [" and", ":"]}
    together = generate_texts(model(), tokenizer(), prompts, 16, **options)
    for prompt, text, seed in zip(prompts, together, (3, 4, 5), strict=True):
        alone = options | {"sampling": Sampling(do_sample=True, top_p=0.9, seed=seed)}
        assert "".join(TextStream(model(), tokenizer(), prompt, 16, **alone)) == text
        assert " and" not in text


def test_an_empty_prompt_is_named():
    with pytest.raises(ValueError, match="prompt must not be empty"):
        generate_texts(model(), tokenizer(), ["a", ""])


# ---------------------------------------------------------------------------------------------------------
# Chat templates.

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe?"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGröße?<|im_end|>\n"


def chat_template(directory, config=None, template=None):
    pytest.importorskip("jinja2")
    from jax_w4a8.models.chat import ChatTemplate

    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTemplate.load(directory)


def test_a_conversation_becomes_the_text_of_its_template(tmp_path):
    template = chat_template(tmp_path, {"chat_template": CHATML})
    assert template.render(TALK) == RENDERED + "<|im_start|>assistant\n"
    assert template.render(TALK, add_generation_prompt=False) == RENDERED


def test_a_template_file_comes_first(tmp_path):
    template = chat_template(tmp_path, {"chat_template": "no"}, CHATML)
    assert template.render(TALK, add_generation_prompt=False) == RENDERED


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": CHATML}, {"name": "rag", "template": "r"}]
    assert chat_template(tmp_path, {"chat_template": named}).render(TALK).startswith(RENDERED)
    with pytest.raises(CheckpointError, match=r"must have a template 'default', got \['rag'\]"):
        chat_template(tmp_path, {"chat_template": named[1:]})
    with pytest.raises(CheckpointError, match="must be a string or a list of named templates"):
        chat_template(tmp_path, {"chat_template": 5})


def test_what_templates_of_hugging_face_use(tmp_path):
    source = (
        "{{ bos_token }}{% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
        "{{ tools | tojson }}{{ strftime_now('%Y') | length }}{{ eos_token }}{{ thinking }}"
    )
    config = {
        "chat_template": source,
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
    }
    template = chat_template(tmp_path, config)
    talk = [*TALK, {"role": "user", "content": "never"}]
    made = template.render(talk, tools=[{"name": "<ü>"}], thinking="no")
    assert made == '<s>Be brief.Größe?[{"name": "<ü>"}]4</s>no'


def test_templates_are_refused_or_refuse_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no chat template, neither chat_template\.jinja nor"):
        chat_template(tmp_path)
    with pytest.raises(CheckpointError, match="is no template: line 1"):
        chat_template(tmp_path, {"chat_template": "{% if %}"})
    strict = chat_template(tmp_path, {"chat_template": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(ValueError, match=r"messages don't fit the chat template .*: roles must alternate"):
        strict.render(TALK)
    sly = chat_template(tmp_path, {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"})
    with pytest.raises(ValueError, match="messages don't fit"):
        sly.render(TALK)
    for messages, error in (("hi", TypeError), ([], ValueError), ([{"content": "x"}], TypeError)):
        with pytest.raises(error, match="messages must"):
            sly.render(messages)


# ---------------------------------------------------------------------------------------------------------
# The command.


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The shipped model with a chat template."""
    pytest.importorskip("jinja2")
    directory = tmp_path_factory.mktemp("chat")
    for file in default_model_path().iterdir():
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}, that")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.01}))
    return directory


def generated(capsys, *arguments):
    assert main(["generate", "--activation-scheme", "symmetric", "--max-new-tokens", "12", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_flags_reach_the_text(capsys, chat_model):
    greedy = generated(capsys, "--json", "--prefill-chunk", "16")
    assert greedy["finish_reason"] == "length"
    stopped = generated(capsys, "--json", "--stop", "of Israel", "--stop", "never")
    assert stopped["text"] == " the king "
    assert stopped["finish_reason"] == "stop"
    prompt = PROMPT.removesuffix(", that")
    chat = generated(capsys, "--json", "--model", str(chat_model), "--chat", "--prompt", prompt)
    assert chat["ids"] == greedy["ids"]
    hot = [generated(capsys, "--json", "--temperature", "3", "--seed", seed)["ids"] for seed in "112"]
    assert hot[0] == hot[1] != hot[2]
    cold = generated(
        capsys, "--json", "--model", str(chat_model), "--do-sample"
    )  # the model's own temperature
    assert cold["ids"] == greedy["ids"]
    varied = generated(capsys, "--json", "--repetition-penalty", "1e6")
    assert len(np.unique(varied["ids"])) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "0"], "temperature must be in (0, inf), got 0.0"),
        (["--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"),
        (["--top-k", "-3"], "top_k must be at least 0, got -3"),
        (["--seed", "-1"], "seed must be at least 0, got -1"),
        (["--stop", ""], "stop_strings must not be empty"),
        (["--prefill-chunk", "1"], "prefill_chunk must be at least 16, got 1"),
        (["--system", "Be brief."], "--system needs --chat"),
        (["--chat"], "has no chat template"),
    ],
)
def test_bad_flags_are_one_line(arguments, message, capsys):
    assert main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
