"""The custom call as a JAX operation: compilation, batching, control flow, threads, other platforms."""

import functools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_w4a8 as w4a8
from jax_w4a8 import ffi

needs_native = pytest.mark.skipif(not w4a8.native_available(), reason="needs the native extension")

E, K, H, I = 5, 2, 64, 48  # noqa: E741
BACKENDS = ["xla", pytest.param("cpu_int4", marks=needs_native)]
NATIVE_ONLY = BACKENDS[1:]


@functools.cache
def _experts(seed: int = 0, group_size: int = 32) -> w4a8.ExpertWeights:
    rng = np.random.default_rng(seed)
    w13 = w4a8.quantize(rng.standard_normal((E, 2 * I, H), np.float32), group_size)
    w2 = w4a8.quantize(rng.standard_normal((E, H, I), np.float32), group_size)
    return w4a8.pack_experts(w13, w2, w2_bias=rng.standard_normal((E, H), np.float32))


def _inputs(*lead: int, dtype=jnp.float32, seed: int = 1):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((*lead, H), np.float32), dtype)
    weights = jnp.asarray(rng.random((*lead, K), np.float32))
    ids = jnp.asarray(rng.integers(0, E, (*lead, K)), jnp.int32)
    return x, weights, ids


def _same(a, b) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}"))


def _run_python(code: str, timeout: float = 120, **environment: str) -> str:
    """Output of a fresh interpreter; fails with its error output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SETUP = f"""
import jax, jax.numpy as jnp, numpy as np
import jax_w4a8 as w4a8
rng = np.random.default_rng(0)
E, K, H, I = {E}, {K}, {H}, {I}
def pack(experts=E, hidden=H, inner=I):
    make = lambda *shape: w4a8.quantize(rng.standard_normal(shape, np.float32), 32)
    return w4a8.pack_experts(make(experts, 2 * inner, hidden), make(experts, hidden, inner))
def inputs(tokens, hidden=H):
    x = jnp.asarray(rng.standard_normal((tokens, hidden), np.float32))
    return x, jnp.ones((tokens, K)) / K, jnp.asarray(rng.integers(0, E, (tokens, K)))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_jit_compiles_once_per_shape_and_equals_eager(backend):
    layer = jax.jit(functools.partial(w4a8.fused_experts, backend=backend))
    for tokens in (3, 4):
        for seed in (1, 2):
            arguments = _inputs(tokens, seed=seed)
            _same(layer(*arguments, _experts()), w4a8.fused_experts(*arguments, _experts(), backend=backend))
    assert layer._cache_size() == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("axes", "out_axis"),
    [((0, 0, 0), 0), ((1, 0, 1), 1), ((0, None, None), 0), ((None, 0, 0), 0), ((None, None, 0), 0)],
)
def test_vmap_over_tokens_equals_a_loop(backend, axes, out_axis):
    batch, tokens = 3, 4
    stacked = _inputs(batch, tokens)
    arguments = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(stacked, axes, strict=True)
    ]
    call = functools.partial(w4a8.fused_experts, backend=backend)
    mapped = jax.vmap(call, (*axes, None), out_axis)(*arguments, _experts())
    for element in range(batch):
        one = [x[0] if axis is None else x[element] for x, axis in zip(stacked, axes, strict=True)]
        _same(jnp.take(mapped, element, out_axis), call(*one, _experts()))


@needs_native
def test_vmap_over_tokens_is_one_call_on_shared_weights():
    call = jax.jit(jax.vmap(w4a8.fused_experts, (0, 0, 0, None)))
    text = call.lower(*_inputs(3, 4), _experts()).as_text()
    assert text.count("custom_call @jax_w4a8_fused_experts") == 1
    assert "tensor<3x5x" not in text  # no copies of the weights' 5 experts


@pytest.mark.parametrize("backend", NATIVE_ONLY)
def test_vmap_over_expert_weights_equals_a_loop(backend):
    sets = [_experts(seed) for seed in (0, 1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
    x, weights, ids = _inputs(4)
    call = functools.partial(w4a8.fused_experts, backend=backend)
    mapped = jax.vmap(call, (None, None, None, 0))(x, weights, ids, stacked)
    for element, experts in enumerate(sets):
        _same(mapped[element], call(x, weights, ids, experts))


@pytest.mark.parametrize("backend", NATIVE_ONLY)
def test_nested_vmap_equals_loops(backend):
    x, weights, ids = _inputs(2, 3, 4)
    call = functools.partial(w4a8.fused_experts, backend=backend)
    inner = jax.vmap(call, (1, 0, 0, None), 1)
    mapped = jax.vmap(inner, (0, 0, 0, None))(jnp.swapaxes(x, 1, 2), weights, ids, _experts())
    for i in range(2):
        for j in range(3):
            _same(mapped[i, :, j], call(x[i, j], weights[i, j], ids[i, j], _experts()))


@pytest.mark.parametrize("backend", NATIVE_ONLY)
@pytest.mark.parametrize("operation", ["apply_experts", "linear", "combine", "moe"])
def test_vmap_of_the_other_operations(backend, operation):
    x, weights, ids = _inputs(3, 4)
    dense = w4a8.pack_linear(w4a8.quantize(np.ones((40, H), np.float32), 32), np.arange(40.0))
    slots = jnp.asarray(np.random.default_rng(3).standard_normal((3, 4, K, H), np.float32))
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((3, 4, E), np.float32))
    call, arguments = {
        "apply_experts": (lambda a, b: w4a8.apply_experts(a, b, _experts(), backend=backend), (x, ids)),
        "linear": (lambda a: w4a8.linear(a, dense, backend=backend), (x,)),
        "combine": (lambda a, b: w4a8.combine(a, b, backend=backend), (slots, weights)),
        "moe": (lambda a, b: w4a8.moe(a, b, _experts(), w4a8.Routing(K), backend=backend), (x, logits)),
    }[operation]
    mapped = jax.vmap(call)(*arguments)
    for element in range(3):
        _same(mapped[element], call(*(x[element] for x in arguments)))


@needs_native
def test_scan_while_cond_with_callbacks_between():  # D2
    experts = _experts()
    x, weights, ids = _inputs(4)
    seen = []

    def step(x, i):
        y = w4a8.fused_experts(x, weights, ids, experts)
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        return jnp.where(i % 2 == 0, y / jnp.abs(y).max(), x), y[0, 0]

    final, _ = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(100)))(x)
    expected = x
    for i in range(100):
        expected, _ = step(expected, jnp.int32(i))
    jax.effects_barrier()
    assert sorted(seen) == sorted([*range(100), *range(100)])
    np.testing.assert_allclose(final, expected, rtol=1e-5)

    branch = jax.jit(
        lambda p, x: jax.lax.cond(p, lambda x: w4a8.fused_experts(x, weights, ids, experts), lambda x: x, x)
    )
    _same(branch(True, x), w4a8.fused_experts(x, weights, ids, experts))
    _same(branch(False, x), x)


@needs_native
def test_donated_tokens():  # D15
    x, weights, ids = _inputs(4)
    expected = np.asarray(w4a8.fused_experts(x, weights, ids, _experts()))
    donating = jax.jit(w4a8.fused_experts, donate_argnums=0)
    given = jnp.array(x)
    _same(donating(given, weights, ids, _experts()), expected)
    with pytest.raises(RuntimeError, match=r"deleted|donated"):
        np.asarray(given)


@needs_native
def test_transposed_producers_and_strided_numpy():  # D6, D7
    x, weights, ids = _inputs(8)
    expected = w4a8.fused_experts(x, weights, ids, _experts())
    inside = jax.jit(lambda xt, *rest: w4a8.fused_experts(jnp.transpose(xt), *rest))
    _same(inside(jnp.asarray(np.ascontiguousarray(np.asarray(x).T)), weights, ids, _experts()), expected)
    raw = np.zeros(x.nbytes + 4, np.uint8)
    unaligned = raw[4:].view(np.float32).reshape(x.shape)
    unaligned[...] = x
    _same(w4a8.fused_experts(unaligned, weights, ids, _experts()), expected)
    strided = np.zeros((8, 2 * H), np.float32)
    strided[:, ::2] = x
    _same(w4a8.fused_experts(strided[:, ::2], np.asarray(weights).T.copy().T, ids, _experts()), expected)


@needs_native
def test_weights_as_arguments_keep_the_program_small():  # D13
    blocks, groups = 128, 16
    shape = (64, blocks, groups, 512)  # 64 MiB of codes
    weights = w4a8.LinearWeights(
        *(
            jax.ShapeDtypeStruct(s, d)
            for s, d in [
                (shape, jnp.uint8),
                ((*shape[:3], 16), jnp.bfloat16),
                ((64, blocks, 16), jnp.float32),
                ((64, blocks, 16), jnp.float32),
            ]
        ),
        out_features=blocks * 16,
        in_features=1024,
        group_size=64,
    )
    stack = jax.jit(lambda x, w: jax.lax.scan(lambda x, one: (w4a8.linear(x, one)[:, :1024], None), x, w)[0])
    text = stack.lower(jax.ShapeDtypeStruct((4, 1024), jnp.float32), weights).as_text()
    assert "jax_w4a8_linear" in text
    assert len(text) < 1_000_000


@needs_native
def test_first_calls_from_eight_threads_at_once():  # D22
    out = _run_python(
        SETUP
        + """
from concurrent.futures import ThreadPoolExecutor
import threading
experts, arguments = pack(), inputs(64)
barrier = threading.Barrier(8)
layer = jax.jit(w4a8.fused_experts)
def call(_):
    barrier.wait()
    return np.asarray(layer(*arguments, experts)).tobytes()
with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(call, range(8)))))
"""
    )
    assert out.strip() == "1"


@needs_native
def test_concurrent_calls_of_one_program():
    layer = jax.jit(w4a8.fused_experts)
    many = [_inputs(40, seed=seed) for seed in range(16)]
    expected = [np.asarray(layer(*arguments, _experts())) for arguments in many]
    with ThreadPoolExecutor(8) as pool:
        for found, want in zip(
            pool.map(lambda a: np.asarray(layer(*a, _experts())), many * 4), expected * 4, strict=True
        ):
            _same(found, want)


@needs_native
@pytest.mark.parametrize("threads", ["1", "2"])
def test_many_calls_in_one_program_do_not_deadlock(threads):
    out = _run_python(
        SETUP
        + """
experts = pack(hidden=256, inner=128)
programs = [inputs(64, 256) for _ in range(12)]
@jax.jit
def together(programs, experts):
    return [w4a8.fused_experts(*arguments, experts) for arguments in programs]
alone = [np.asarray(w4a8.fused_experts(*arguments, experts)) for arguments in programs]
for _ in range(20):
    for one, want in zip(together(programs, experts), alone):
        assert np.array_equal(np.asarray(one), want)
print("done")
""",
        timeout=90,
        NPROC=threads,
    )
    assert out.strip() == "done"


def test_int64_ids_under_x64():
    out = _run_python(
        SETUP
        + """
jax.config.update("jax_enable_x64", True)
experts, (x, weights, _) = pack(), inputs(6)
x, weights = x.astype(jnp.float32), weights.astype(jnp.float32)
ids = jnp.asarray(rng.integers(0, E, (6, K)))
assert ids.dtype == jnp.int64
y = w4a8.fused_experts(x, weights, ids, experts)
assert y.dtype == jnp.float32
assert np.array_equal(y, w4a8.fused_experts(x, weights, ids.astype(jnp.int32), experts))
wide = ids.at[2, 1].set(2**32)  # 0 in its low 32 bits
assert bool(jnp.isnan(w4a8.fused_experts(x, weights, wide, experts, backend="xla")[2]).all())
print("done")
"""
    )
    assert out.strip() == "done"


@needs_native
def test_other_platforms_get_the_pure_jax_program():
    from jax import export

    layer = jax.jit(lambda *arguments: w4a8.fused_experts(*arguments, backend="cpu_int4"))
    arguments = (*_inputs(4), _experts())
    for platform in ("cuda", "tpu"):
        module = export.export(layer, platforms=[platform])(*arguments).mlir_module()
        assert "custom_call @jax_w4a8" not in module
    exported = export.export(layer, platforms=["cpu"], disabled_checks=w4a8.DISABLE_JAX_EXPORT_CHECKS)(
        *arguments
    )
    assert "custom_call @jax_w4a8_fused_experts_v1" in exported.mlir_module()
    _same(exported.call(*arguments), layer(*arguments))


@needs_native
def test_a_wrong_id_is_an_error_and_the_process_goes_on():
    x, weights, ids = _inputs(4)
    layer = jax.jit(w4a8.fused_experts)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*id 9 of token 2, slot 1"):
        layer(x, weights, ids.at[2, 1].set(9), _experts()).block_until_ready()
    assert bool(jnp.isfinite(layer(x, weights, ids, _experts())).all())


@needs_native
def test_scratch_is_kept_and_can_be_freed():
    w4a8.release_scratch()
    x, weights, ids = _inputs(100)
    first = np.asarray(w4a8.fused_experts(x, weights, ids, _experts()))
    for _ in range(20):
        w4a8.fused_experts(x, weights, ids, _experts()).block_until_ready()
    kept = w4a8.release_scratch()
    assert 0 < kept < 4 << 20
    assert w4a8.release_scratch() == 0
    _same(w4a8.fused_experts(x, weights, ids, _experts()), first)


class TestImportGuard:
    @pytest.mark.parametrize(
        ("compiled", "runtime", "refused"),
        [((0, 3), (0, 3), False), ((0, 3), (0, 5), False), ((0, 5), (0, 3), True), ((1, 0), (0, 9), True)],
    )
    def test_newer_headers_are_refused(self, compiled, runtime, refused):
        reason = ffi.incompatibility(compiled, runtime)
        assert (reason is not None) == refused
        if refused:
            assert f"{compiled[0]}.{compiled[1]}" in reason
            assert f"{runtime[0]}.{runtime[1]}" in reason

    def test_version_is_read_from_the_runtime(self, tmp_path):
        header = tmp_path / "c_api.h"
        header.write_text("#define XLA_FFI_API_MAJOR 7\n#define XLA_FFI_API_MINOR 11\n")
        assert ffi.runtime_ffi_version(header) == (7, 11)
        assert ffi.runtime_ffi_version()[1] >= 3

    @pytest.mark.parametrize(
        ("hide", "reason"),
        [
            ("sys.modules['jax_w4a8._native'] = None", "can't be imported"),
            (
                "import types; m = types.ModuleType('_native'); m.ffi_version = lambda: (9, 9); "
                "sys.modules['jax_w4a8._native'] = m",
                "compiled for XLA FFI 9.9",
            ),
        ],
    )
    def test_without_the_extension_pure_jax_runs_and_says_so(self, hide, reason):
        out = _run_python(
            f"""
import logging, sys
logging.basicConfig(stream=sys.stdout)
{hide}
{SETUP}
y = w4a8.fused_experts(*inputs(4), pack())
assert bool(jnp.isfinite(y).all())
assert w4a8.instruction_sets() == () and not w4a8.native_available()
for call in (lambda: w4a8.fused_experts(*inputs(4), pack(), backend="cpu_int4"),
             lambda: w4a8.set_instruction_set("avx2")):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        print("refused:", error)
"""
        )
        assert out.count(reason) == 3, out
        assert "WARNING:jax_w4a8:" in out


@needs_native
class TestInstructionSet:
    def test_environment_forces_a_lower_one(self):
        lowest = w4a8.instruction_sets()[-1]
        out = _run_python(
            "import jax_w4a8; print(jax_w4a8.instruction_set())", JAX_W4A8_INSTRUCTION_SET=lowest
        )
        assert out.strip() == lowest == "portable"

    def test_unknown_in_the_environment_is_an_error(self):
        with pytest.raises(AssertionError, match=r"JAX_W4A8_INSTRUCTION_SET must be one of .*'mmx'"):
            _run_python("import jax_w4a8", JAX_W4A8_INSTRUCTION_SET="mmx")

    def test_call_forces_and_restores(self):
        best = w4a8.instruction_sets()[0]
        with w4a8.using_instruction_set("portable"):
            assert w4a8.instruction_set() == "portable"
        assert w4a8.instruction_set() == best
        with pytest.raises(ValueError, match=r"instruction set must be one of .*'mmx'"):
            w4a8.set_instruction_set("mmx")

    def test_thread_limit_is_checked(self):
        with pytest.raises(ValueError, match="limit must be at least 1, got 0"), w4a8.thread_limit(0):
            pass
