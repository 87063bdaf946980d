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
# # Sharding over eight devices
#
# An MoE layer spread over a mesh. The eight devices here are eight parts of one CPU, which is how sharded
# programs are tried out before they meet several machines: they show what is where, not how fast it is.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before anything runs

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec

import jax_w4a8 as w4a8
from jax_w4a8.sharding import ExpertSharding, place

assert jax.device_count() == 8
E, H, I, T = 16, 256, 256, 64
rng = np.random.default_rng(0)
w13 = w4a8.quantize(rng.normal(size=(E, 2 * I, H)).astype(np.float32) / 16, group_size=64)
w2 = w4a8.quantize(rng.normal(size=(E, H, I)).astype(np.float32) / 16, group_size=64)
experts = jax.tree.map(np.asarray, w4a8.pack_experts(w13, w2))
x = jnp.asarray(rng.normal(size=(T, H)), jnp.float32)
logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32)
routing = w4a8.Routing(top_k=4)

layer = jax.jit(w4a8.moe, static_argnames=("routing", "sharding"))
alone = np.asarray(layer(x, logits, experts, routing=routing))

# %% [markdown]
# ## Three ways to split a layer
#
# - *Expert parallel*: each device holds two of the sixteen experts, whole.
# - *Tensor parallel*: each device holds an eighth of every expert's inner width (in whole groups of weights).
# - *Both, and data parallel*: experts over four devices times tokens over two.

# %%
eight = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
four = jax.make_mesh((4, 2), ("tensor", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
both = jax.make_mesh((4, 2), ("expert", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
ways = {
    "expert x 8": ExpertSharding(eight, expert_axis="expert"),
    "expert x 8, bitwise": ExpertSharding(eight, expert_axis="expert", bitwise=True),
    "tensor x 4": ExpertSharding(four, tensor_axis="tensor"),
    "expert x 4, data x 2": ExpertSharding(both, expert_axis="expert", tokens=PartitionSpec("data")),
}


def bytes_by_device(weights):
    held = np.zeros(8)
    for leaf in jax.tree.leaves(weights):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    return held


held, difference = {}, {}
for name, sharding in ways.items():
    placed = place(experts, sharding)
    y = np.asarray(layer(x, logits, placed, routing=routing, sharding=sharding))
    held[name] = bytes_by_device(placed)
    difference[name] = np.linalg.norm(y - alone) / np.linalg.norm(alone)
    print(f"{name:22} {held[name].max() / 2**20:.2f} MiB a device, off by {difference[name]:.1e}")

whole = sum(leaf.nbytes for leaf in jax.tree.leaves(experts))
assert held["expert x 8"].max() <= whole / 8
assert difference["expert x 8, bitwise"] == 0  # not a bit
assert difference["expert x 8"] < 1e-6  # sums in another order
assert difference["tensor x 4"] < 0.02  # each device quantises its part of the inner row by its own range

# %% [markdown]
# ## What travels
#
# Weights stay where they are: the compiled program moves activations alone, by one sum over devices. Without
# `sharding`, XLA would gather whatever a custom call takes.

# %%
for name, sharding in ways.items():
    program = (
        layer.lower(x, logits, place(experts, sharding), routing=routing, sharding=sharding)
        .compile()
        .as_text()
    )
    kinds = {kind: program.count(f" {kind}(") for kind in ("all-reduce", "all-gather", "all-to-all")}
    print(f"{name:22}", kinds)
    if name == "expert x 8":
        assert kinds["all-reduce"] >= 1
        assert kinds["all-gather"] == 0

# %% [markdown]
# ## What each device does
#
# With experts split, a device works for the tokens that chose its experts. If the router has favourites, the
# device that holds them is the one that all others wait for.

# %%
_, even = w4a8.route(logits, routing)
_, skewed = w4a8.route(logits + jnp.linspace(2, -2, E), routing)
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
names = list(held)
for number, name in enumerate(names):
    axes[0].bar(np.arange(8) + (number - 1.5) * 0.2, held[name] / 2**20, 0.2, label=name)
axes[0].axhline(whole / 2**20, color="black", linestyle="--", linewidth=1, label="the whole layer")
axes[0].set(xlabel="device", ylabel="MiB of packed weights", title="What each device holds")
axes[0].set_ylim(0, 1.5 * whole / 2**20)
axes[0].legend(fontsize=8, ncols=2, loc="upper center")
for ids, label, shift in ((even, "router without favourites", -0.2), (skewed, "router with favourites", 0.2)):
    slots = np.bincount(np.asarray(ids).ravel() // (E // 8), minlength=8)
    axes[1].bar(np.arange(8) + shift, slots, 0.4, label=f"{label}: busiest {slots.max()}")
axes[1].set(
    xlabel="device",
    ylabel=f"token-expert pairs, of {T * 4} in all",
    title="What each device computes, experts over 8",
)
axes[1].legend()
plt.show()
