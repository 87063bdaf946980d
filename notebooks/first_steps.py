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
# # First steps
#
# One mixture-of-experts layer from float weights to W4A8: quantise, pack, route, run; then a look at how far
# the result is from the float layer, and which half of "W4A8" the difference comes from.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jax_w4a8 as w4a8

E, H, I, T = 16, 512, 256, 256  # experts, hidden size, intermediate size, tokens
keys = jax.random.split(jax.random.key(0), 4)
w13 = jax.random.normal(keys[0], (E, 2 * I, H)) / np.sqrt(H)  # gate projections, then up projections
w2 = jax.random.normal(keys[1], (E, H, I)) / np.sqrt(I)
x = jax.random.normal(keys[2], (T, H))
router_logits = jax.random.normal(keys[3], (T, E))

# %% [markdown]
# ## Quantise and pack
#
# `quantize` gives integers of [-8, 7] (the codes) and one scale for each group of 64 inputs. `pack_experts`
# lays the codes out as the kernels read them, two to a byte.

# %%
q13, q2 = w4a8.quantize(w13, group_size=64), w4a8.quantize(w2, group_size=64)
experts = w4a8.pack_experts(q13, q2)
print("codes", q13.codes.dtype, q13.codes.shape, "from", q13.codes.min(), "to", q13.codes.max())
print("scale", q13.scale.dtype, q13.scale.shape)
print(f"float32 {(w13.nbytes + w2.nbytes) / 2**20:.1f} MiB, packed {experts.nbytes / 2**20:.1f} MiB")
assert experts.nbytes < (w13.nbytes + w2.nbytes) / 6

# %% [markdown]
# ## Route and run
#
# Weights are a pytree. Pass them to `jit` as an argument: what a jitted function closes over becomes a
# constant of the program.

# %%
routing = w4a8.Routing(top_k=4)


@jax.jit
def layer(x, router_logits, experts):
    return w4a8.moe(x, router_logits, experts, routing)


y = layer(x, router_logits, experts)
config = w4a8.MoEConfig(E, routing.top_k, H, I)
print(w4a8.explain(config, experts.key()))
print("instruction set:", w4a8.instruction_set())

# %% [markdown]
# ## Compare with float
#
# The float layer, written out. Routing is the same in both: it is always float32.


# %%
@jax.jit
def float_experts(x, weights, ids, w13, w2):
    """Every expert on every token, then the chosen ones: simple, and wasteful."""
    gate, up = jnp.split(jnp.einsum("th,eoh->teo", x, w13, precision="highest"), 2, axis=-1)
    outputs = jnp.einsum("tei,ehi->teh", jax.nn.silu(gate) * up, w2, precision="highest")
    chosen = jnp.take_along_axis(outputs, ids[..., None], axis=1)
    return jnp.sum(chosen * weights[..., None], axis=1)


weights, ids = w4a8.route(router_logits, routing)
exact = float_experts(x, weights, ids, w13, w2)


def relative_error(y, exact):
    """Of each token: length of the difference over the length of the exact output."""
    return np.linalg.norm(y - exact, axis=-1) / np.linalg.norm(exact, axis=-1)


# The same layer with only one of its two halves quantised.
weights_only = float_experts(x, weights, ids, q13.dequantize(), q2.dequantize())
errors = {
    "INT4 weights alone": relative_error(weights_only, exact),
    "INT4 weights, INT8 activations": relative_error(y, exact),
}
activations_only = relative_error(y, weights_only)
for name, error in errors.items():
    print(f"{name:32} median {np.median(error):.3f}, largest {error.max():.3f}")
print(f"{'what the activations add':32} median {np.median(activations_only):.3f}")
assert np.median(errors["INT4 weights, INT8 activations"]) < 0.2
assert np.median(activations_only) < 0.1 * np.median(errors["INT4 weights alone"])

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
left.plot(exact[:40].ravel(), y[:40].ravel(), ".", markersize=2, alpha=0.3)
limit = float(jnp.abs(exact[:40]).max())
left.plot([-limit, limit], [-limit, limit], color="black", linewidth=1, label="equal")
left.set(
    xlabel="float32 output", ylabel="W4A8 output", title="Each output element of 40 tokens", aspect="equal"
)
left.legend()
bins = np.linspace(0, max(error.max() for error in errors.values()), 40)
for (name, error), style in zip(errors.items(), ({"alpha": 0.5}, {"histtype": "step", "linewidth": 2})):
    right.hist(error, bins, label=name, **style)
added = float(np.median(activations_only))
right.axvline(added, color="tab:green", label=f"what the activations add: {added:.3f}")
right.set(
    xlabel="relative error of a token's output",
    ylabel=f"tokens (of {T})",
    title="Almost all of the error is INT4's",
)
right.set_ylim(top=1.4 * right.get_ylim()[1])
right.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## The same bits, always
#
# A token's result does not depend on the batch around it, the number of threads, or the instruction set.

# %%
alone = jnp.concatenate([layer(x[i : i + 1], router_logits[i : i + 1], experts) for i in range(8)])
assert np.array_equal(alone, y[:8])
shuffled = np.random.default_rng(0).permutation(T)
assert np.array_equal(layer(x[shuffled], router_logits[shuffled], experts), y[shuffled])
for name in w4a8.instruction_sets():
    with w4a8.using_instruction_set(name):
        assert np.array_equal(layer(x, router_logits, experts), y)
    print(f"{name}: the same {y.size} numbers, bit for bit")
