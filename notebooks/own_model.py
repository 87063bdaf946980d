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
# # Bring your own Flax model
#
# A small mixture-of-experts language model in Flax NNX, written without a thought of this package: trained in
# float32, swapped to W4A8 by rules on its module paths, compared in loss, size and speed, saved and restored.
# In the end its router learns on, on top of frozen INT4 experts.

# %%
import inspect
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jax_w4a8 as w4a8
from jax_w4a8.nnx import FloatMoE, W4A8Options, quantize_model, restore, save

# %% [markdown]
# ## Text
#
# No downloads: the docstrings of NumPy, as characters. Every tenth docstring is kept for evaluation.

# %%
documents = [inspect.getdoc(getattr(np, name)) or "" for name in sorted(dir(np)) if not name.startswith("_")]
documents = [one for one in dict.fromkeys(documents) if len(one) > 200]
CONTEXT = 12


def as_bytes(documents):
    return np.frombuffer("\n".join(documents).encode("ascii", "ignore"), np.uint8)


alphabet = np.unique(as_bytes(documents))
VOCABULARY = len(alphabet)


def windows(documents):
    """Each character with the twelve before it: [N, 13]."""
    tokens = np.searchsorted(alphabet, as_bytes(documents)).astype(np.int32)
    return np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)


test_set = windows(documents[::10])
test_set = test_set[:: len(test_set) // 4096]
train_set = windows([one for number, one in enumerate(documents) if number % 10])
print(f"{len(documents)} docstrings, {len(train_set)} characters of {VOCABULARY} kinds to train on")

# %% [markdown]
# ## The model
#
# The last 12 characters are embedded side by side and go through two blocks; each has a mixture of 8 experts,
# of which a character's context uses 2.

# %%
E, H, I, TOP_K = 8, 192, 192, 2


class MoE(nnx.Module):
    """Every expert on every token, weighted by a router that leaves all but two at zero."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        self.router = nnx.Linear(H, E, use_bias=False, rngs=rngs)
        self.gate = nnx.Param(init(rngs.params(), (E, H, I)))
        self.up = nnx.Param(init(rngs.params(), (E, H, I)))
        self.down = nnx.Param(init(rngs.params(), (E, I, H)))

    def __call__(self, x):
        probabilities = jax.nn.softmax(self.router(x))
        values, ids = jax.lax.top_k(probabilities, TOP_K)
        values = values / values.sum(-1, keepdims=True)
        weights = jnp.einsum("tk,tke->te", values, jax.nn.one_hot(ids, E))
        inner = jax.nn.silu(jnp.einsum("th,ehi->tei", x, self.gate[...]))
        inner = inner * jnp.einsum("th,ehi->tei", x, self.up[...])
        return jnp.einsum("te,tei,eih->th", weights, inner, self.down[...])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(H, rngs=rngs)
        self.moe = MoE(rngs)

    def __call__(self, x):
        return x + self.moe(self.norm(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, 32, rngs=rngs)
        self.mix = nnx.Linear(32 * CONTEXT, H, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(H, VOCABULARY, rngs=rngs)

    def __call__(self, context):
        x = self.mix(self.embed(context).reshape(len(context), -1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# %% [markdown]
# ## Train in float32


# %%
def loss_of(model, batch):
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()


# graph_updates=False: Variables that change are updated, all others stay where they are. Without it nnx.jit
# copies every Variable at every call, frozen weights included.
@nnx.jit(graph_updates=False)
def train_step(model, optimizer, batch):
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


evaluate = jax.jit(loss_of)


def train(model, steps, rate, wrt=nnx.Param, seed=0):
    optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(rate, steps)), wrt=wrt)
    rng = np.random.default_rng(seed)
    return [
        float(train_step(model, optimizer, train_set[rng.integers(0, len(train_set), 192)]))
        for _ in range(steps)
    ]


model = Model(nnx.Rngs(0))
curve = train(model, 240, 3e-3)
float_loss = float(evaluate(model, test_set))
print(f"test loss {float_loss:.3f} nats a character; an even guess has {np.log(VOCABULARY):.3f}")
assert float_loss < 0.65 * np.log(VOCABULARY)

# %% [markdown]
# ## Swap its layers
#
# Rules go from path patterns to options, the first match counts. A function tells what this class of MoE
# module means: that is all the package must know of it. The head stays in float32.


# %%
def describe(moe):
    return FloatMoE(
        gate=moe.gate[...].mT,  # [E, I, H]: outputs first, as checkpoints have it
        up=moe.up[...].mT,
        down=moe.down[...].mT,
        router=moe.router.kernel,
        routing=w4a8.Routing(top_k=TOP_K),
    )


rules = {"head": None, "blocks.*": W4A8Options(group_size=32), "*": W4A8Options(group_size=64)}
quantized, report = quantize_model(model, rules, moe={MoE: describe})
print(report)
assert {entry.path for entry in report.swapped} == {"mix", "blocks.0.moe", "blocks.1.moe"}

# %% [markdown]
# ## Loss, size, speed

# %%
quantized_loss = float(evaluate(quantized, test_set))
print(f"test loss: float32 {float_loss:.4f}, W4A8 {quantized_loss:.4f}")
assert abs(quantized_loss - float_loss) < 0.1


def nbytes(model):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


def best_time(function, *arguments, repetitions=50):
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


run = jax.jit(lambda model, context: model(context))
sizes = [1, 16, 256]
times = {
    name: [best_time(run, one, test_set[:size, :-1]) for size in sizes]
    for name, one in (("float32", model), ("W4A8", quantized))
}
for name, one in (("float32", model), ("W4A8", quantized)):
    measured = ", ".join(f"{t:.2f} ms for {size}" for t, size in zip(times[name], sizes))
    print(f"{name:>8}: {nbytes(one) / 2**20:.2f} MiB, {measured}")
assert nbytes(quantized) < nbytes(model) / 4

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
left.plot(np.convolve(curve, np.ones(10) / 10, "valid"), label="training, mean of 10 steps")
left.axhline(float_loss, color="tab:green", label=f"test, float32: {float_loss:.3f}")
left.axhline(quantized_loss, color="tab:orange", linestyle="--", label=f"test, W4A8: {quantized_loss:.3f}")
left.set(xlabel="training step", ylabel="loss in nats a character", title="Loss")
left.set_ylim(top=1.15 * max(curve))
left.legend(loc="upper right")
middle.bar(
    ["float32", "W4A8"],
    [nbytes(one) / 2**20 for one in (model, quantized)],
    color=["tab:green", "tab:orange"],
)
middle.set(ylabel="MiB of parameters", title="Size of the whole model")
middle.bar_label(middle.containers[0], fmt="%.2f")
middle.margins(y=0.1)
for name, colour, marker in (("float32", "tab:green", "o"), ("W4A8", "tab:orange", "s")):
    right.loglog(sizes, times[name], label=name, color=colour, marker=marker)
right.set(xlabel="contexts at a time", ylabel="ms for a call", title="Time of the whole model")
right.set_xticks(sizes, [str(size) for size in sizes])
right.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
right.minorticks_off()
right.grid(alpha=0.3)
right.legend()
plt.show()

# %% [markdown]
# ## Save and restore
#
# The model to restore into is abstract: nothing is computed or allocated for it.

# %%
with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "model"
    save(path, quantized)
    abstract = nnx.eval_shape(lambda: quantize_model(Model(nnx.Rngs(0)), rules, moe={MoE: describe})[0])
    restored = restore(path, abstract)
assert float(evaluate(restored, test_set)) == quantized_loss

# %% [markdown]
# ## Train on, through the frozen experts
#
# Packed weights are no `nnx.Param`: optimisers pass them by, and gradients flow through them to the router,
# the norms and the embedding.

# %%
packed_before = jax.tree.map(np.asarray, quantized.blocks[0].moe.experts.get_value())
train(quantized, 60, 1e-3, seed=1)
tuned_loss = float(evaluate(quantized, test_set))
print(f"test loss: float32 {float_loss:.4f}, W4A8 {quantized_loss:.4f}, tuned around it {tuned_loss:.4f}")
packed_after = quantized.blocks[0].moe.experts.get_value()
assert all(jax.tree.leaves(jax.tree.map(np.array_equal, packed_before, packed_after)))
assert tuned_loss < quantized_loss
