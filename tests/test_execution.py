"""The operations under JAX's control flow, execution modes and export; see docs/transforms.md."""

import functools
import multiprocessing
import os
import re
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.layout import Format, Layout

import jax_w4a8 as w4a8
from tests import reference

needs_native = pytest.mark.skipif(not w4a8.native_available(), reason="needs the native extension")
E, H, I, K, T = 4, 64, 96, 2, 9  # noqa: E741
BACKENDS = ["xla", pytest.param("cpu_int4", marks=needs_native)]


@functools.cache
def _experts() -> w4a8.ExpertWeights:
    return reference.random_layer(biased=True).packed()


def _batch(tokens: int = T, seed: int = 1) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, weights, ids = map(jnp.asarray, reference.random_batch(tokens, seed=seed))
    return x, weights, ids


def _fresh_process(code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=reference.ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


# --- Control flow.


@pytest.mark.parametrize("backend", BACKENDS)
def test_while_and_fori_equal_python_loops(backend):
    x, weights, ids = _batch()
    experts = _experts()
    layer = jax.jit(functools.partial(w4a8.fused_experts, backend=backend))

    def step(x, experts):
        return w4a8.fused_experts(x, weights, ids, experts, backend=backend)

    def while_loop(x, experts):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1], experts)), (0, x))[1]

    def fori_loop(x, experts, times):
        return jax.lax.fori_loop(0, times, lambda _, x: step(x, experts), x)

    expected = x
    for _ in range(3):
        expected = layer(expected, weights, ids, experts)
    reference.assert_same_bits(jax.jit(while_loop)(x, experts), expected)
    reference.assert_same_bits(jax.jit(fori_loop)(x, experts, 3), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_and_without_jit(backend):
    arguments = (*_batch(), _experts())
    call = functools.partial(w4a8.fused_experts, backend=backend)
    compiled = jax.jit(call)(*arguments)
    reference.assert_same_bits(call(*arguments), compiled)
    if backend == "cpu_int4":  # the pure-JAX backend, op by op, is the same to rounding and takes a minute
        with jax.disable_jit():
            reference.assert_same_bits(call(*arguments), compiled)
            assert jax.grad(lambda x: call(x, *arguments[1:]).sum())(arguments[0]).shape == (T, H)


def test_vmap_over_switch_of_layers():
    """A mapped predicate turns ``cond`` into a selection: both sides run, and the result is a loop's."""
    x, weights, ids = (jnp.stack([part, part[::-1]]) for part in _batch())
    experts = _experts()

    def one(flag, x, weights, ids):
        return jax.lax.cond(flag, lambda x: w4a8.fused_experts(x, weights, ids, experts), lambda x: -x, x)

    flags = jnp.array([True, False])
    mapped = jax.vmap(one)(flags, x, weights, ids)
    for i in range(2):
        reference.assert_same_bits(mapped[i], one(flags[i], x[i], weights[i], ids[i]))


# --- vmap: axes, sets of experts, copies.


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_over_tokens_and_sets_of_experts_on_other_axes(backend):
    sets = [reference.random_layer(seed).packed() for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *sets)
    x, weights, ids = (jnp.stack(parts) for parts in zip(_batch(seed=1), _batch(seed=2), strict=True))
    call = functools.partial(w4a8.fused_experts, backend=backend)
    mapped = jax.vmap(call, (1, 0, 0, 1), out_axes=1)(jnp.moveaxis(x, 0, 1), weights, ids, stacked)
    for i in range(2):
        reference.assert_same_bits(mapped[:, i], call(x[i], weights[i], ids[i], sets[i]))


def test_vmap_over_sets_inside_vmap_over_tokens():
    sets = [reference.random_layer(seed).packed() for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sets)
    x, weights, ids = (jnp.stack(parts) for parts in zip(_batch(4, 1), _batch(4, 2), strict=True))
    call = w4a8.fused_experts
    over_sets = jax.vmap(call, (None, None, None, 0))
    mapped = jax.vmap(over_sets, (0, 0, 0, None))(x, weights, ids, stacked)
    swapped = jax.vmap(jax.vmap(call, (0, 0, 0, None)), (None, None, None, 0))(x, weights, ids, stacked)
    for i in range(2):
        for j in range(2):
            one = call(x[i], weights[i], ids[i], sets[j])
            reference.assert_same_bits(mapped[i, j], one)
            reference.assert_same_bits(swapped[j, i], one)


@pytest.mark.parametrize(
    "routing", [w4a8.Routing(K), w4a8.Routing(K, scoring="sigmoid", num_expert_group=2, topk_group=1)]
)
def test_vmap_over_routing(routing):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 5, 2, E)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(3, E)), jnp.float32)

    def one(logits, bias):
        return w4a8.route(logits, routing, bias)

    weights, ids = jax.vmap(jax.vmap(one, (1, None)))(logits, bias)
    for i in range(3):
        for j in range(2):
            one_weights, one_ids = w4a8.route(logits[i, :, j], routing, bias[i])
            reference.assert_same_bits(weights[i, j], one_weights)
            reference.assert_same_bits(ids[i, j], one_ids)


@needs_native
@pytest.mark.parametrize("mapped", ["x", "ids", "experts", "bias"])
def test_vmap_copies_nothing_that_is_not_mapped(mapped):
    """The compiled program holds no array with the batch axis before an unmapped operand's axes."""
    batch = 3
    x, weights, ids = _batch(16)
    experts = _experts()

    def repeat(tree):
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * batch), tree)

    if mapped == "bias":
        call = jax.vmap(
            lambda parts, *rest: w4a8.fused_experts(*rest, w4a8.with_trainable_parts(experts, parts)),
            (0, None, None, None),
        )
        arguments = (repeat(w4a8.trainable_parts(experts)), x, weights, ids)
    else:
        operands = {"x": x, "weights": weights, "ids": ids, "experts": experts}
        axes = tuple(0 if name == mapped else None for name in operands)
        call = jax.vmap(w4a8.fused_experts, axes)
        operands[mapped] = repeat(operands[mapped])
        arguments = tuple(operands.values())
    text = jax.jit(call).lower(*arguments).compile().as_text()
    codes = ",".join(map(str, experts.w13.codes.shape))
    assert codes in text
    if mapped != "experts":
        assert f"u8[{batch},{codes}]" not in text
        assert f"u8[{batch * E},{codes.partition(',')[2]}]" not in text
    if mapped != "x":
        results = re.findall(rf"f32\[{batch},16,{H}\]|f32\[{batch * 16},{H}\]", text)
        broadcasts = re.findall(rf"f32\[(?:{batch},16|{batch * 16}),{H}\][^=]*= [^=]*broadcast\(%", text)
        assert results  # the result itself
        assert not broadcasts


# --- Execution.


@needs_native
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_callbacks_beside_the_layer(asynchronous):  # D2
    out = reference.in_process(_CALLBACKS[asynchronous], JAX_PLATFORMS="cpu")
    assert out.strip() == "100 callbacks"


def _callbacks(asynchronous: bool) -> None:
    jax.config.update("jax_cpu_enable_async_dispatch", asynchronous)
    x, weights, ids = _batch(32)
    experts, seen = _experts(), []

    def step(x, i):
        jax.debug.callback(lambda i: seen.append(int(i)), i)
        y = w4a8.fused_experts(x, weights, ids, experts)
        shift = jax.pure_callback(lambda i: np.float32(i), jax.ShapeDtypeStruct((), np.float32), i)
        return y / jnp.abs(y).max() + 0 * shift, None

    y, _ = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(100)))(x)
    assert bool(jnp.isfinite(y).all())
    jax.effects_barrier()
    print(len(set(seen)), "callbacks")


def callbacks_async() -> None:
    _callbacks(True)


def callbacks_sync() -> None:
    _callbacks(False)


_CALLBACKS = {True: callbacks_async, False: callbacks_sync}


@needs_native
def test_asynchronous_dispatch_of_dependent_calls():
    """Results may be asked for later, and in any order; nothing that a call reads is reused before it ran."""
    x, weights, ids = _batch(64)
    layer = jax.jit(w4a8.fused_experts)
    pending = [x]
    for _ in range(20):
        y = layer(pending[-1], weights, ids, _experts())
        pending.append(y / jnp.abs(y).max())
    for i in reversed(range(20)):
        y = layer(pending[i].block_until_ready(), weights, ids, _experts())
        reference.assert_same_bits(y / jnp.abs(y).max(), pending[i + 1])


@needs_native
def test_fork_after_use_runs_or_says_why_not():  # D3
    out = reference.in_process(fork_after_use, timeout=60, JAX_PLATFORMS="cpu")
    assert "compiled before: same" in out
    assert re.search(r"new shape: RuntimeError: process \d+ was forked .* 'spawn'", out)
    assert "child ended with 0" in out


def fork_after_use() -> None:
    warnings.simplefilter("ignore")  # JAX and Python both warn of forks
    layer, arguments, others = jax.jit(w4a8.fused_experts), (*_batch(), _experts()), _batch(3)
    expected = np.asarray(layer(*arguments))
    child = os.fork()
    if child == 0:
        try:
            same = np.array_equal(np.asarray(layer(*arguments)), expected)
            os.write(1, f"compiled before: {'same' if same else 'other'}\n".encode())
            try:
                layer(*others, _experts())
            except RuntimeError as error:
                os.write(1, f"new shape: RuntimeError: {error}\n".encode())
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            os.write(1, f"child ended with {status}\n".encode())
            return
        time.sleep(0.05)
    os.kill(child, 9)
    os.write(1, b"child hung\n")


@needs_native
def test_spawned_processes():  # D3
    out = reference.in_process(spawn_two, timeout=120, JAX_PLATFORMS="cpu")
    assert out.split() == ["same", "same"]


def spawn_two() -> None:
    expected = np.asarray(w4a8.fused_experts(*_batch(), _experts()))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for found in pool.map(spawned, range(2)):
            print("same" if np.array_equal(found, expected) else "other")


def spawned(_: int) -> np.ndarray:
    return np.asarray(w4a8.fused_experts(*_batch(), _experts()))


@needs_native
def test_weights_from_unaligned_mapped_and_transposed_buffers(tmp_path):  # D6
    layer = reference.random_layer(biased=True)
    batch = _batch()
    expected = w4a8.fused_experts(*batch, layer.packed())
    host = w4a8.pack_experts(*layer)

    def shifted(array: np.ndarray) -> np.ndarray:
        raw = b"\0\0\0\0" + array.tobytes()
        return np.frombuffer(raw, array.dtype, offset=4).reshape(array.shape)

    def mapped(array: np.ndarray) -> np.ndarray:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.bin"
        path.write_bytes(b"\0" * 8 + array.tobytes())
        return np.memmap(path, array.dtype, "r", offset=8, shape=array.shape)

    def transposed(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array.T).T

    for place in (shifted, mapped, transposed):
        experts = jax.tree.map(place, host)
        reference.assert_same_bits(w4a8.fused_experts(*batch, experts), expected)
    unpacked = [w4a8.QuantizedTensor(transposed(q.codes), transposed(q.scale), 32) for q in layer[:2]]
    repacked = w4a8.pack_experts(*unpacked, *layer[2:])
    reference.assert_same_bits(w4a8.fused_experts(*batch, repacked), expected)


@needs_native
def test_arrays_of_another_layout():  # D7
    x, weights, ids = _batch()
    expected = w4a8.fused_experts(x, weights, ids, _experts())
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def column_major(array: jax.Array) -> jax.Array:
        order = tuple(reversed(range(array.ndim)))
        return jax.device_put(array, Format(Layout(order), device))

    moved = column_major(x), column_major(weights), column_major(ids)
    assert moved[0].format.layout.major_to_minor == (1, 0)
    experts = jax.tree.map(column_major, _experts())
    reference.assert_same_bits(jax.jit(w4a8.fused_experts)(*moved, experts), expected)


@needs_native
def test_weights_closed_over_become_constants():  # D13
    """The trap that the documentation warns of, and the way round it."""
    layer = reference.random_layer(experts=8, hidden=256, inner=256)
    experts = layer.packed()
    batch = tuple(map(jnp.asarray, reference.random_batch(hidden=256, experts=8)))
    closed = jax.jit(lambda *batch: w4a8.fused_experts(*batch, experts)).lower(*batch).as_text()
    passed = jax.jit(w4a8.fused_experts).lower(*batch, experts).as_text()
    assert len(closed) > experts.nbytes
    assert len(passed) < 20_000


@needs_native
def test_weights_passed_as_arguments_cost_no_memory():  # D14
    out = reference.in_process(resident_memory, JAX_PLATFORMS="cpu")
    assert float(out) < 0.5


def resident_memory() -> None:
    """Prints by how much memory grows when a program with large weights runs, over their size."""
    experts = reference.random_layer(experts=64, hidden=1024, inner=512, scale_dtype=jnp.bfloat16)
    packed = jax.block_until_ready(experts.packed())
    batch = tuple(map(jnp.asarray, reference.random_batch(hidden=1024, experts=64)))
    layer = jax.jit(w4a8.fused_experts)
    before = _resident()
    jax.block_until_ready(layer(*batch, packed))
    print((_resident() - before) / packed.nbytes)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@needs_native
def test_persistent_compilation_cache_in_a_new_process(tmp_path):  # D17
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = (reference.in_process(cached_compilation, **environment).split() for _ in range(2))
    assert first[0] == "0"
    assert int(second[0]) >= 1
    assert first[1] == second[1]


def cached_compilation() -> None:
    """Prints hits of the cache for the layer's program, and the result."""
    arguments = (*_batch(), _experts())
    hits = []
    jax.monitoring.register_event_listener(
        lambda name, **_: hits.append(name) if name == "/jax/compilation_cache/cache_hits" else None
    )
    before = len(hits)
    y = jax.jit(w4a8.fused_experts)(*arguments)
    print(len(hits) - before, np.asarray(y).tobytes().hex())


@needs_native
@pytest.mark.parametrize("limit", [7, 7.0, np.float32(7), np.int64(7)])
def test_attributes_have_one_type_whatever_the_caller_writes(limit):  # D19
    activation = w4a8.Activation("swigluoai", alpha=2, limit=limit)
    call = jax.jit(functools.partial(w4a8.fused_experts, activation=activation))
    text = call.lower(*_batch(), _experts()).as_text()
    attributes = re.search(r"mhlo.backend_config = \{([^}]*)\}", text)[1]
    assert "limit = 7.000000e+00 : f32" in attributes
    assert "alpha = 2.000000e+00 : f32" in attributes
    assert re.search(r"activation = \d : i32", attributes)
    assert "symmetric = false" in attributes
    expected = functools.partial(w4a8.fused_experts, activation=w4a8.Activation("swigluoai", 2.0, 7.0))
    reference.assert_same_bits(call(*_batch(), _experts()), expected(*_batch(), _experts()))


def test_fallback_does_not_lean_on_ragged_dot():  # D20
    """Nor on memory that grows with the number of experts, as that operation's expansion on CPU does."""
    used = {}
    for count in (4, 64):
        experts = reference.random_layer(experts=count).packed()
        batch = tuple(map(jnp.asarray, reference.random_batch(experts=count)))
        lowered = jax.jit(functools.partial(w4a8.fused_experts, backend="xla")).lower(*batch, experts)
        assert "ragged" not in lowered.as_text()
        used[count] = lowered.compile().memory_analysis().temp_size_in_bytes
    codes_of_all = 64 * 3 * 64 * 96
    assert used[64] - used[4] < codes_of_all


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs free-threaded Python")
def test_the_extension_leaves_the_gil_off():  # D21
    assert not sys._is_gil_enabled()


# --- Export.  D16


def _exported(
    platforms: list[str], backend: str = "auto", disabled_checks=w4a8.DISABLE_JAX_EXPORT_CHECKS
) -> export.Exported:
    """The layer for any number of tokens."""
    (tokens,) = export.symbolic_shape("T")
    arguments = (
        jax.ShapeDtypeStruct((tokens, H), np.float32),
        jax.ShapeDtypeStruct((tokens, K), np.float32),
        jax.ShapeDtypeStruct((tokens, K), np.int32),
        jax.eval_shape(lambda: _experts()),
    )
    call = jax.jit(functools.partial(w4a8.fused_experts, backend=backend))
    return export.export(call, platforms=platforms, disabled_checks=disabled_checks)(*arguments)


_LOAD = """
import sys, numpy as np, jax
from jax import export
exported = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
data = np.load(sys.argv[2])
leaves = [jax.numpy.asarray(data[f"arr_{i}"]) for i in range(len(data.files))]
y = jax.jit(exported.call)(*leaves)
print(np.asarray(y).tobytes().hex())
"""


def _flat_export() -> bytes:
    """The layer as a function of plain arrays, as a process without this package can call it."""
    structure = jax.tree.structure(_experts())

    def call(x, weights, ids, *leaves):
        return w4a8.fused_experts(x, weights, ids, jax.tree.unflatten(structure, leaves))

    (tokens,) = export.symbolic_shape("T")
    lead = [jax.ShapeDtypeStruct((tokens, *part.shape[1:]), part.dtype) for part in _batch()]
    exported = export.export(jax.jit(call), disabled_checks=w4a8.DISABLE_JAX_EXPORT_CHECKS)(
        *lead, *jax.tree.leaves(_experts())
    )
    return bytes(exported.serialize())


@needs_native
def test_export_needs_the_checks_disabled():
    with pytest.raises(ValueError, match="custom call"):
        export.export(jax.jit(w4a8.fused_experts))(*_batch(), _experts())


@needs_native
def test_export_in_fresh_processes(tmp_path):
    pytest.importorskip("flatbuffers")
    program, data = tmp_path / "layer.jax", tmp_path / "arguments.npz"
    program.write_bytes(_flat_export())
    batch = _batch(5)
    np.savez(data, *batch, *jax.tree.leaves(_experts()))
    with_import = _fresh_process("import jax_w4a8\n" + _LOAD, str(program), str(data))
    assert with_import.returncode == 0, with_import.stderr
    expected = np.asarray(w4a8.fused_experts(*batch, _experts()))
    assert with_import.stdout.strip() == expected.tobytes().hex()
    without = _fresh_process(_LOAD, str(program), str(data))
    assert without.returncode != 0
    assert "jax_w4a8_fused_experts_v1" in without.stderr  # names the package that is missing


@needs_native
def test_export_for_many_platforms_with_any_number_of_tokens():
    exported = _exported(["cpu", "cuda", "tpu"])
    assert exported.platforms == ("cpu", "cuda", "tpu")
    module = exported.mlir_module()
    assert "jax_w4a8_fused_experts_v1" in module  # one branch; the others are pure JAX
    for tokens in (1, 5, 16):
        batch = _batch(tokens)
        reference.assert_same_bits(exported.call(*batch, _experts()), w4a8.fused_experts(*batch, _experts()))


@pytest.mark.parametrize("tokens", [1, 9])
def test_export_without_custom_calls(tokens):
    """The pure-JAX backend exports with no check disabled: any platform can run it without this package."""
    exported = _exported(["cpu"], backend="xla", disabled_checks=[])
    assert "custom_call @jax_w4a8" not in exported.mlir_module()
    batch = _batch(tokens)
    expected = np.asarray(w4a8.fused_experts(*batch, _experts(), backend="xla"), np.float64)
    assert reference.relative_error(exported.call(*batch, _experts()), expected) < 1e-5


@needs_native
def test_gradients_are_exported_too():
    pytest.importorskip("flatbuffers")

    def loss(x, weights, ids, experts):
        return (w4a8.fused_experts(x, weights, ids, experts) ** 2).sum()

    exported = export.export(jax.jit(loss), disabled_checks=w4a8.DISABLE_JAX_EXPORT_CHECKS)(
        *_batch(), _experts()
    )
    x, weights, ids = _batch()
    found = jax.grad(lambda x: exported.call(x, weights, ids, _experts()))(x)
    np.testing.assert_allclose(found, jax.grad(loss)(x, weights, ids, _experts()), rtol=1e-6)
