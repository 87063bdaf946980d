"""Generation: unequal prompts, chunks, sampling. A row gets what it would get alone, to the bit."""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_w4a8.models import Sampling, default_model_path, load_model
from jax_w4a8.models.prompts import check_prompts
from jax_w4a8.models.sampling import choose, start_sampler

from .checkpoints import DATA

TINY = DATA / "qwen3_moe-g32-pack"
LENGTHS = (3, 40, 17)
NEW = 4
DRAWN = Sampling(
    do_sample=True, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5
)


@functools.cache
def loaded(path):
    return load_model(path, "symmetric")


@functools.cache
def prompts(path):
    rng = np.random.default_rng(0)
    vocabulary = loaded(path).config.vocab_size
    return [rng.integers(0, vocabulary, length).tolist() for length in LENGTHS]


@pytest.fixture(params=[TINY, default_model_path()], ids=["tiny", "shipped"])
def path(request):
    return request.param


@functools.partial(jax.jit, static_argnames="capacity")
def _logits(model, ids, lengths, capacity):
    hidden, _ = model.hidden_states(ids, model.empty_cache(len(ids), capacity), lengths)
    return model.logits(hidden)


def test_logits_of_unequal_prompts_have_the_bits_of_each_alone(path):
    model, padded = loaded(path), check_prompts(prompts(path), loaded(path).config.vocab_size)
    garbage = np.where(np.arange(padded.longest) < padded.lengths[:, None], padded.ids, 7)
    batch = np.asarray(_logits(model, garbage, padded.lengths, 64))
    for row, prompt in enumerate(prompts(path)):
        alone = np.asarray(model(np.array([prompt])))
        assert np.array_equal(batch[row, : len(prompt)], alone[0])


@functools.partial(jax.jit, donate_argnums=3)
def _more(model, ids, lengths, cache):
    hidden, cache = model.hidden_states(ids, cache, lengths)
    return model.logits(hidden), cache


def test_logits_in_chunks_have_the_bits_of_the_whole(path):
    model = loaded(path)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 50)).astype(np.int32)
    whole = np.asarray(model(ids))
    for size, capacity in ((1, 300), (16, 128)):
        cache = model.empty_cache(2, capacity)
        for start in range(0, 50, size):
            part = ids[:, start : start + size]
            width = part.shape[1]
            lengths = np.full(2, width, np.int32)
            logits, cache = _more(model, np.pad(part, ((0, 0), (0, size - width))), lengths, cache)
            assert np.array_equal(logits[:, :width], whole[:, start : start + width])


@pytest.mark.parametrize(
    ("path", "sampling"), [(TINY, Sampling()), (default_model_path(), DRAWN)], ids=["greedy", "drawn"]
)
def test_texts_of_unequal_prompts_are_those_of_each_alone(path, sampling):
    model = loaded(path)
    batch = model.generate(prompts(path), NEW, sampling=sampling)
    assert batch.shape == (len(LENGTHS), NEW)
    for row, prompt in enumerate(prompts(path)):
        own = dataclasses.replace(sampling, seed=sampling.seed + row)
        assert np.array_equal(model.generate([prompt], NEW, sampling=own), batch[row : row + 1])
    chunked = model.generate(prompts(path), NEW, sampling=sampling, prefill_chunk=16)
    assert np.array_equal(chunked, batch)


def test_prompts_come_in_many_forms():
    model = loaded(TINY)
    expected = model.generate(np.array([[5, 6, 7], [8, 9, 10]]), 3)
    for same in (
        [[5, 6, 7], [8, 9, 10]],
        ([5, 6, 7], np.array([8, 9, 10])),
        [jnp.array([5, 6, 7]), (8, 9, 10)],
        jnp.array([[5, 6, 7], [8, 9, 10]]),
    ):
        assert np.array_equal(model.generate(same, 3), expected)


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        ([[1], []], ValueError, "token_ids must hold at least one token per row, got an empty prompt 1"),
        ([], ValueError, "token_ids must hold at least one prompt"),
        ([[1, 2], [600]], ValueError, r"token_ids must lie in \[0, 512\), found 600"),
        ([[1, 2], [0.5]], TypeError, "token_ids must be integers, got float64"),
        ([[[1]], [[2, 3]]], ValueError, r"token_ids must have shape \[B, T\]|inhomogeneous"),
        ([[1] * 257], ValueError, "token_ids must hold at most 256 tokens per row, .* got 257"),
        (
            [[1], [1] * 250],
            ValueError,
            "max_new_tokens must be at most 6: .* longest prompt takes 250, got 7",
        ),
    ],
)
def test_bad_prompts_are_named(token_ids, error, message):
    with pytest.raises(error, match=message):
        loaded(TINY).generate(token_ids, 7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prefill_chunk": 8}, ValueError, "prefill_chunk must be at least 16, got 8"),
        ({"sampling": 0.5}, TypeError, "sampling must be a Sampling, got 0.5"),
        ({"stop_token_ids": ["a"]}, TypeError, r"stop_token_ids must be integers, got \('a',\)"),
        ({"sampling": Sampling(seed=(1, 2))}, ValueError, "seed must be an integer or one per row, 1, got 2"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        loaded(TINY).generate([[1]], 2, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0}, ValueError, r"temperature must be in \(0, inf\), got 0"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number, got 'hot'"),
        ({"top_k": -1}, ValueError, "top_k must be at least 0, got -1"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, ValueError, "top_p"),
        ({"min_p": -0.1}, ValueError, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": True}, TypeError, "min_p must be a number, got True"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty"),
        ({"do_sample": 1}, TypeError, "do_sample must be True or False, got 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got 'x'"),
    ],
)
def test_bad_sampling_is_named(options, error, message):
    with pytest.raises(error, match=message):
        Sampling(**options)


# ---------------------------------------------------------------------------------------------------------
# Sampling, against numpy.

VOCABULARY = 23
DRAWS = 4000


def warped(logits, sampling, seen=()):
    """Probabilities ``[V]`` of the next token, step by step as ``generate`` of Hugging Face has them."""
    logits = logits.astype(np.float64)
    for token in seen:
        logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    logits = logits / sampling.temperature
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        logits[order[sampling.top_k :]] = -np.inf
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    before = np.cumsum(shares[order]) - shares[order]
    shares[order[before >= sampling.top_p]] = 0
    shares[shares < sampling.min_p * shares.max()] = 0
    return shares / shares.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": 4},
        {"top_k": 1, "temperature": 3.0},
        {"top_k": 0, "top_p": 0.6},
        {"top_k": 0, "min_p": 0.2},
        {"top_k": 0, "repetition_penalty": 2.0},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.05, "temperature": 1.7, "repetition_penalty": 1.3},
        {"top_k": 100, "temperature": 0.3},
    ],
    ids=str,
)
def test_tokens_are_drawn_by_the_probabilities_of_hugging_faces_steps(options):
    sampling = Sampling(do_sample=True, **options)
    logits = (np.random.default_rng(3).standard_normal(VOCABULARY) * 2).astype(np.float32)
    prompt = np.array([4, 9, 4], np.int32)
    expected = warped(logits, sampling, seen={4, 9})

    @jax.jit
    def draw(logits, seeds):
        ids = jnp.broadcast_to(prompt, (DRAWS, 3))
        state = start_sampler(sampling.rules, seeds, ids, jnp.full(DRAWS, 3), VOCABULARY)
        return choose(jnp.broadcast_to(logits, (DRAWS, VOCABULARY)), state, sampling.rules, sampling.numbers)

    tokens, state = draw(logits, sampling.seeds(DRAWS))
    drawn = np.bincount(tokens, minlength=VOCABULARY) / DRAWS
    assert drawn[expected == 0].sum() == 0
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(drawn - expected) <= 4.5 * deviation).all()
    if state.seen is not None:
        assert np.array_equal(np.flatnonzero(state.seen[0]), np.unique([4, 9, tokens[0]]))


def test_a_repetition_penalty_forbids_loops_without_sampling():
    model = loaded(default_model_path())
    prompt = [list(range(300, 310))]
    assert len(np.unique(model.generate(prompt, 24))) < 24
    made = model.generate(prompt, 24, sampling=Sampling(repetition_penalty=1e6))
    assert len(np.unique(made)) == 24


def test_seeds_decide_texts():
    model, prompt = loaded(TINY), [[1, 2, 3]]
    one, again, other = (
        model.generate(prompt, 8, sampling=Sampling(do_sample=True, top_k=0, seed=seed)) for seed in (1, 1, 2)
    )
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    rows = model.generate(prompt * 3, 8, sampling=Sampling(do_sample=True, top_k=0, seed=(2, 1, 2)))
    assert np.array_equal(rows, np.concatenate([other, one, other]))


# ---------------------------------------------------------------------------------------------------------
# What a step costs beside its program.


def test_steps_compare_no_models():
    """Another model of the same structure finds the programs, and its steps run no comparison in Python.

    One of two models takes time in every step, and an interrupt inside it comes out as a ValueError.
    """
    load_model(TINY).generate([[1, 2, 3]], 6)
    stream = load_model(TINY).stream([[1, 2, 3]], 6)
    next(stream)
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        rest = list(stream)
    finally:
        sys.setprofile(None)
    assert len(rest) == 5
    assert called.count("step") == 5
    assert not {"__eq__", "__hash__"} & set(called)


# ---------------------------------------------------------------------------------------------------------
# Memory.


def _temporary_bytes(model, tokens, slots):
    cache = jax.eval_shape(lambda: model.empty_cache(1, slots))
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    compiled = _more.lower(model, ids, jax.ShapeDtypeStruct((1,), jnp.int32), cache).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_chunks_bound_the_memory_of_a_long_prompt():
    model = loaded(TINY)
    chunk, slots = 64, 4096
    bounded = _temporary_bytes(model, chunk, slots)
    assert bounded < 1.1 * _temporary_bytes(model, chunk, slots // 8) + 2**16
    assert bounded < _temporary_bytes(model, slots, slots) / 16
