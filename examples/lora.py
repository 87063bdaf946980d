"""LoRA: low-rank adapters on attention and router, trained through frozen W4A8 experts.

The model that the package ships learns a text in another style. Its INT4 weights stay as they are; gradients
reach the adapters through them by the straight-through rule of docs/transforms.md.

    python examples/lora.py --steps 40
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_w4a8.models import default_model_path, load_model
from jax_w4a8.models.text import load_tokenizer
from jax_w4a8.weights import LinearWeights

#: The Gettysburg Address, 1863.
TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in \
Liberty, and dedicated to the proposition that all men are created equal. Now we are engaged in a great \
civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We \
are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a final \
resting place for those who here gave their lives that that nation might live. It is altogether fitting \
and proper that we should do this. But, in a larger sense, we can not dedicate -- we can not consecrate -- \
we can not hallow -- this ground. The brave men, living and dead, who struggled here, have consecrated it, \
far above our poor power to add or detract. The world will little note, nor long remember what we say \
here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to \
the unfinished work which they who fought here have thus far so nobly advanced. It is rather for us to be \
here dedicated to the great task remaining before us -- that from these honored dead we take increased \
devotion to that cause for which they gave the last full measure of devotion -- that we here highly \
resolve that these dead shall not have died in vain -- that this nation, under God, shall have a new birth \
of freedom -- and that government of the people, by the people, for the people, shall not perish from the \
earth."""


def _features(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of one of the model's linear maps."""
    weight = linear.weight.get_value()
    if isinstance(weight, LinearWeights):
        return weight.in_features, weight.out_features
    outputs, inputs = weight.shape
    return inputs, outputs


def add_adapters(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> None:
    """Puts an adapter beside each attention projection and each router of a decoder."""
    for layer in model.layers:
        places = [(layer.attention, name) for name in ("query", "key", "value", "output")]
        if hasattr(layer.mlp, "router"):
            places.append((layer.mlp, "router"))
        for parent, name in places:
            base = getattr(parent, name)
            inputs, outputs = _features(base)
            setattr(parent, name, nnx.LoRA(inputs, rank, outputs, base_module=base, rngs=rngs))


def batches(ids: np.ndarray, batch: int, length: int, rng: np.random.Generator) -> jax.Array:
    """int32 ``[batch, length + 1]``, pieces of the text from random places."""
    starts = rng.integers(0, len(ids) - length, batch)
    return jnp.asarray(np.stack([ids[start : start + length + 1] for start in starts]), jnp.int32)


def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each next token, in nats."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(
    steps: int = 40,
    batch: int = 4,
    length: int = 48,
    rank: int = 8,
    learning_rate: float = 5e-3,
    seed: int = 0,
    backend: str = "auto",
) -> tuple[list[float], Any]:
    """Trains adapters; returns the loss of each step, and the model with what was learnt."""
    path = default_model_path()
    ids = np.asarray(load_tokenizer(path).encode(TEXT).ids, np.int32)
    model = load_model(path, backend=backend)
    add_adapters(model, rank, nnx.Rngs(seed))
    structure, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    optimizer = optax.adam(learning_rate)

    @jax.jit
    def step(adapters: Any, state: Any, frozen: Any, tokens: jax.Array) -> Any:
        def loss(adapters: Any) -> jax.Array:
            return loss_of(nnx.merge(structure, adapters, frozen), tokens)

        value, gradients = jax.value_and_grad(loss)(adapters)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(adapters, updates), state

    rng = np.random.default_rng(seed)
    state, losses = optimizer.init(adapters), []
    for _ in range(steps):
        value, adapters, state = step(adapters, state, frozen, batches(ids, batch, length, rng))
        losses.append(float(value))
    return losses, nnx.merge(structure, adapters, frozen)


def main() -> None:
    """Trains, and prints the curve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    arguments = parser.parse_args()
    losses, _ = train(arguments.steps, rank=arguments.rank, learning_rate=arguments.learning_rate)
    scale = 50 / max(losses)
    for number, loss in enumerate(losses):
        if number % 5 == 0 or number == len(losses) - 1:
            print(f"step {number:4d}  loss {loss:6.3f}  {'#' * round(loss * scale)}")


if __name__ == "__main__":
    main()
