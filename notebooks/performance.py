# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Performance
#
# How fast could an MoE layer be on this machine, and how fast is it? Two limits are measured first: INT8
# multiply-accumulates per second in registers alone, and bytes per second read from memory. A layer that
# performs `n` operations for each byte of weights that it reads can't do better than
# `min(peak, n * bandwidth)`: the roofline.

# %%
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jax_w4a8 as w4a8
from jax_w4a8 import ffi

assert w4a8.native_available(), ffi.unavailable_reason()
THREADS = ffi.num_threads()
print(f"{THREADS} threads, {w4a8.instruction_set()}")

# %% [markdown]
# ## The machine's limits


# %%
def per_second(work, repetitions=3):
    """Best of several: units of work per second, all threads at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda _: time.sleep(0.001), range(THREADS)))
        rates = []
        for _ in range(repetitions):
            start = time.perf_counter()
            units = sum(pool.map(work, range(THREADS)))
            rates.append(units / (time.perf_counter() - start))
    return max(rates)


buffer = np.ones(1 << 28, np.uint8)
share = len(buffer) // THREADS // 256 * 256


def read(thread):
    ffi.read_probe(buffer[thread * share : (thread + 1) * share])
    return share


# Limits are measured again between measurements of the layer, and the best of each counts: whatever else the
# machine does at a moment slows limit and layer down alike.
peaks, bandwidths = [], []


def measure_limits():
    peaks.append(per_second(lambda _: ffi.peak_probe(30_000)))
    bandwidths.append(per_second(read))


measure_limits()
print(f"peak {peaks[0] / 1e9:.0f} G INT8 multiply-accumulates/s, {bandwidths[0] / 1e9:.1f} GB/s read")

# %% [markdown]
# ## The layer, and pure JAX beside it
#
# The layer has 32 experts, of which a token uses 4. Several copies that differ are taken in turn, together
# larger than what caches hold for one core, so that a single token meets cold weights, as in a real decode.
# Routing is random: the more tokens, the more of them share an expert's weights.
#
# - `cpu_int4` is the native kernel, `xla` the same arithmetic in pure JAX on the same packed weights.
# - `ragged_dot` is what people write first: float32 weights, rows sorted by expert, `jax.lax.ragged_dot`.

# %%
E, K, H, I, COPIES = 32, 4, 1024, 768, 6
MACS_PER_TOKEN = 3 * K * H * I
routing = w4a8.Routing(top_k=K)


def random_layer(seed):
    rng = np.random.default_rng(seed)
    codes13 = rng.integers(-8, 8, (E, 2 * I, H), np.int8)
    codes2 = rng.integers(-8, 8, (E, H, I), np.int8)
    scale13 = (rng.random((E, 2 * I, H // 128), np.float32) + 0.5) / np.float32(4.6 * np.sqrt(H))
    scale2 = (rng.random((E, H, I // 128), np.float32) + 0.5) / np.float32(4.6 * np.sqrt(I))
    return w4a8.QuantizedTensor(codes13, scale13, 128), w4a8.QuantizedTensor(codes2, scale2, 128)


codes = [random_layer(seed) for seed in range(COPIES)]
layers = [jax.device_put(w4a8.pack_experts(*one)) for one in codes]
EXPERT_BYTES = layers[0].nbytes / E
print(f"{COPIES} layers of {layers[0].nbytes / 2**20:.0f} MiB packed")


@jax.jit
def ragged_dot_layer(x, weights, ids, matrices):
    w13, w2 = matrices
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=E).astype(jnp.int32)
    gate, up = jnp.split(jax.lax.ragged_dot(x[order // K], w13, sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w2, sizes)
    slots = jnp.zeros_like(y).at[order].set(y).reshape(*ids.shape, -1)
    return jnp.einsum("tkh,tk->th", slots, weights)


def with_backend(backend):
    return jax.jit(
        lambda x, weights, ids, experts: w4a8.fused_experts(x, weights, ids, experts, backend=backend)
    )


floats = [jnp.swapaxes(one.dequantize(), 1, 2) for one in codes[0]]
implementations = {
    "cpu_int4": (with_backend("cpu_int4"), layers, [1, 4, 16, 64, 256, 1024], 3 * COPIES),
    "xla": (with_backend("xla"), layers[:1], [1, 16, 256], 2),
    "ragged_dot, float32": (ragged_dot_layer, [floats], [1, 16, 64], 2),
}


# %%
def inputs(tokens, number):
    rng = np.random.default_rng((tokens, number))
    x = jnp.asarray(rng.standard_normal((tokens, H), np.float32))
    ids = np.argsort(rng.random((tokens, E)), axis=1)[:, :K].astype(np.int32)
    return x, jnp.full((tokens, K), 1 / K), jnp.asarray(ids), len(np.unique(ids))


def measure(call, weights, tokens, repetitions):
    """Median seconds, and experts that were read, over different inputs and layers."""
    seconds, experts = [], []
    for number in range(-1, repetitions):
        *arguments, used = inputs(tokens, number + 1)
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        call(*arguments, weights[number % len(weights)]).block_until_ready()
        if number >= 0:  # the first call compiles
            seconds.append(time.perf_counter() - start)
            experts.append(used)
    return np.median(seconds), np.mean(experts)


points = {name: [] for name in implementations}
for name, (call, weights, sizes, repetitions) in implementations.items():
    for tokens in sizes:
        measure_limits()
        seconds, used = measure(call, weights, tokens, repetitions)
        macs = tokens * MACS_PER_TOKEN
        points[name].append((macs / (used * EXPERT_BYTES), macs / seconds, tokens))
peak, bandwidth = max(peaks), max(bandwidths)
print(f"limits: {peak / 1e9:.0f} GMAC/s, {bandwidth / 1e9:.1f} GB/s")
for name, series in points.items():
    for intensity, rate, tokens in series:
        roof = min(peak, intensity * bandwidth)
        print(
            f"{name:>20} {tokens:5} tokens: {1e3 * tokens * MACS_PER_TOKEN / rate:8.2f} ms, "
            f"{rate / 1e9:6.1f} GMAC/s, {rate / roof:5.0%} of the roof"
        )
ours = {tokens: rate for _, rate, tokens in points["cpu_int4"]}
for name in ("xla", "ragged_dot, float32"):
    for _, rate, tokens in points[name]:
        assert ours[tokens] > 2 * rate, (name, tokens)

# %%
figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
intensities = np.geomspace(0.5, 512, 200)
axis.loglog(
    intensities, np.minimum(peak, intensities * bandwidth) / 1e9, color="black", label="limit of this machine"
)
for (name, series), marker in zip(points.items(), "osD"):
    x, y, tokens = (np.array(column) for column in zip(*series))
    axis.loglog(x, y / 1e9, marker=marker, label=name)
    if name == "cpu_int4":
        for place in zip(x, y / 1e9, tokens):
            axis.annotate(f"{place[2]}", place[:2], xytext=(7, -11), textcoords="offset points", fontsize=9)
axis.set(
    xlabel="multiply-accumulates per byte of packed weights",
    ylabel="G multiply-accumulates per second",
    title=f"MoE layer, {E} experts, top {K}, {H} x {I}, {THREADS} threads, {w4a8.instruction_set()}",
)
axis.text(512, 1.25 * peak / 1e9, f"{peak / 1e9:.0f} GMAC/s", ha="right")
axis.annotate(
    f"{bandwidth / 1e9:.0f} GB/s",
    (0.8, 0.8 * bandwidth / 1e9),
    xytext=(-6, 8),
    textcoords="offset points",
    ha="right",
)
axis.set_ylim(top=2.5 * peak / 1e9)
axis.grid(which="major", alpha=0.3)
for scale in (axis.xaxis, axis.yaxis):
    scale.set_major_formatter("{x:g}")
axis.legend(title="numbers at points: tokens", loc="lower right")
plt.show()
