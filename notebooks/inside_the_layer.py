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
# # Inside the layer
#
# Three things that decide how good and how fast a W4A8 MoE layer is: which experts the tokens go to, what
# INT8 does to a token with an outlier, and how many weights share a scale.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jax_w4a8 as w4a8

rng = np.random.default_rng(0)

# %% [markdown]
# ## Where tokens go
#
# Real routers have favourites: here some experts' logits are higher throughout. Models of DeepSeek's family
# even that out by a correction bias, which is added to the scores for the choice of experts alone and is not
# learnt by gradient: after each batch it goes down for crowded experts and up for idle ones.

# %%
E, T, K = 32, 1024, 4
favour = np.sort(rng.normal(size=E))[::-1]
logits = jnp.asarray(rng.normal(size=(T, E)) + favour, jnp.float32)
routing = w4a8.Routing(top_k=K, scoring="sigmoid")
route = jax.jit(w4a8.route, static_argnums=1)


def load(bias):
    _, ids = route(logits, routing, correction_bias=jnp.asarray(bias, jnp.float32))
    return np.bincount(np.asarray(ids).ravel(), minlength=E)


bias = np.zeros(E)
loads = [load(bias)]
for _ in range(200):
    bias += 0.01 * np.sign(T * K / E - loads[-1])
    loads.append(load(bias))
print(f"busiest expert: {loads[0].max()} tokens without the bias, {loads[-1].max()} with it")
print(f"experts without a token: {(loads[0] == 0).sum()}, then {(loads[-1] == 0).sum()}")
assert loads[0].sum() == loads[-1].sum() == T * K
assert loads[-1].max() < 0.5 * loads[0].max()

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
for axis, one, title in zip(
    axes, (loads[0], loads[-1]), ("Scores as they come", "After 200 steps of correction")
):
    axis.bar(np.arange(E), one)
    axis.axhline(T * K / E, color="black", linewidth=1, linestyle="--", label=f"even: {T * K // E} tokens")
    axis.set(xlabel="expert", title=title)
axes[0].set_ylabel(f"tokens, of {T} with {K} experts each")
axes[0].legend()
plt.show()

# %% [markdown]
# ## What INT8 does to a token with an outlier
#
# A token is quantised by its own range: 255 steps from its lowest to its highest element. One huge element
# takes the range, and the others fall on ever fewer steps. That costs the token its precision, and no other
# token anything.

# %%
H, I = 512, 256
keys = jax.random.split(jax.random.key(1), 2)
w13 = w4a8.quantize(jax.random.normal(keys[0], (8, 2 * I, H)) / np.sqrt(H), group_size=64)
w2 = w4a8.quantize(jax.random.normal(keys[1], (8, H, I)) / np.sqrt(I), group_size=64)
experts = w4a8.pack_experts(w13, w2)
tokens = jnp.asarray(rng.normal(size=(16, H)), jnp.float32)
ids = jnp.asarray(rng.integers(0, 8, (16, 2)), jnp.int32)
weights = jnp.full((16, 2), 0.5)
run = jax.jit(w4a8.fused_experts, static_argnames="activation_scheme")


@jax.jit
def float_run(x):
    """The same INT4 weights, activations in floating point."""
    gate, up = jnp.split(jnp.einsum("th,eoh->teo", x, w13.dequantize(), precision="highest"), 2, axis=-1)
    outputs = jnp.einsum("tei,ehi->teh", jax.nn.silu(gate) * up, w2.dequantize(), precision="highest")
    return jnp.mean(jnp.take_along_axis(outputs, ids[..., None], axis=1), axis=1)


factors = np.array([1, 2, 5, 10, 20, 50, 100, 200, 500])
schemes = ("asymmetric", "symmetric")
error = {scheme: [] for scheme in schemes}
undisturbed = {scheme: run(tokens, weights, ids, experts, activation_scheme=scheme) for scheme in schemes}
for factor in factors:
    outlier = tokens.at[0, 7].set(3.0 * float(factor))
    # What the other 511 elements do to the output: the difference that they make.
    without = jnp.zeros_like(tokens).at[0, 7].set(3.0 * float(factor))
    exact = float_run(outlier)[0]
    for scheme in schemes:
        y = run(outlier, weights, ids, experts, activation_scheme=scheme)
        assert np.array_equal(y[1:], undisturbed[scheme][1:])  # the other tokens: not a bit
        contribution = np.linalg.norm(exact - float_run(without)[0])
        error[scheme].append(np.linalg.norm(y[0] - exact) / contribution)
for scheme in schemes:
    print(f"{scheme:10} error at 1 x {error[scheme][0]:.3f}, at 500 x {error[scheme][-1]:.2f}")
assert error["asymmetric"][0] < error["symmetric"][0] < 0.05
assert error["asymmetric"][-1] > 10 * error["asymmetric"][0]

# %%
figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
for scheme, marker in zip(schemes, "os"):
    axis.loglog(factors, error[scheme], marker=marker, label=scheme)
axis.axhline(1, color="black", linewidth=1, linestyle="--", label="as large as what the others contribute")
axis.set(
    xlabel="size of the one element (1: three standard deviations of the others)",
    ylabel="error of the output, as a share of\nwhat the other elements contribute",
    title="One element takes the range of its token",
)
axis.set_xticks([1, 10, 100, 500], ["1", "10", "100", "500"])
axis.set_yticks([0.01, 0.1, 1], ["1 %", "10 %", "100 %"])
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# ## Group size: error and speed
#
# Fewer weights to a scale means scales that fit better, and more of them to read and to multiply by. The
# error is that of the layer's output against float weights; times are the best of several, of the whole layer
# for one token (weights warm in the cache, so that they tell little) and for 512.

# %%
E, H, I, K = 16, 1024, 512, 4
keys = jax.random.split(jax.random.key(2), 4)
float13 = jax.random.normal(keys[0], (E, 2 * I, H)) / np.sqrt(H)
float2 = jax.random.normal(keys[1], (E, H, I)) / np.sqrt(I)
routing = w4a8.Routing(top_k=K)


@jax.jit
def exact_layer(x, logits):
    weights, ids = w4a8.route(logits, routing)
    gate, up = jnp.split(jnp.einsum("th,eoh->teo", x, float13), 2, axis=-1)
    outputs = jnp.einsum("tei,ehi->teh", jax.nn.silu(gate) * up, float2)
    chosen = jnp.take_along_axis(outputs, ids[..., None], axis=1)
    return jnp.sum(chosen * weights[..., None], axis=1)


layer = jax.jit(lambda x, logits, experts: w4a8.moe(x, logits, experts, routing))


def seconds(*arguments):
    start = time.perf_counter()
    layer(*arguments).block_until_ready()
    return time.perf_counter() - start


x = jax.random.normal(keys[2], (512, H))
logits = jax.random.normal(keys[3], (512, E))
exact = exact_layer(x, logits)
group_sizes = [32, 64, 128, 256, -1]
packed = [
    w4a8.pack_experts(*(w4a8.quantize(w, group_size=g) for w in (float13, float2))) for g in group_sizes
]
table = []
for experts in packed:
    y = layer(x, logits, experts)
    layer(x[:1], logits[:1], experts).block_until_ready()  # compiles
    table.append(
        {
            "error": float(np.linalg.norm(y - exact) / np.linalg.norm(exact)),
            "bits": 8 * experts.nbytes / (float13.size + float2.size),
            "one": np.inf,
            "many": np.inf,
        }
    )
# Best of several, group sizes taken in turn, so that all meet the machine in the same moods.
for _ in range(25):
    for row, experts in zip(table, packed):
        row["many"] = min(row["many"], 1e3 * seconds(x, logits, experts))
        row["one"] = min(row["one"], *(1e3 * seconds(x[:1], logits[:1], experts) for _ in range(5)))
names = [str(g) if g > 0 else "channel" for g in group_sizes]
for name, row in zip(names, table):
    print(
        f"{name:>8}: error {row['error']:.3f}, {row['bits']:.2f} bits a weight, "
        f"1 token {row['one']:.2f} ms, 512 tokens {row['many']:.1f} ms"
    )
errors = [row["error"] for row in table]
assert errors == sorted(errors)
assert table[0]["bits"] > table[-1]["bits"]

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
axes[0].bar(names, errors)
axes[0].set(ylabel="relative error of the output", title="Error, all 512 tokens")
axes[1].bar(names, [row["one"] for row in table], color="tab:orange")
axes[1].set(ylabel="ms for 1 token", title="Time, one token")
axes[2].bar(names, [row["many"] for row in table], color="tab:green")
axes[2].set(ylabel="ms for 512 tokens", title="Time, 512 tokens")
for axis in axes:
    axis.set_xlabel("weights to a scale (group size)")
plt.show()
