"""The LoRA example learns through frozen experts, on a small scale."""

import importlib.util

import numpy as np
import pytest

from tests import reference

pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
pytest.importorskip("tokenizers")


def _example():
    spec = importlib.util.spec_from_file_location("lora", reference.ROOT / "examples" / "lora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loss_goes_down_and_only_adapters_change():
    losses, model = _example().train(steps=15, rank=4)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.5, losses

    adapters = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    learnt = [path for path in adapters if path[-1] == "lora_b"]
    assert {"router", "query", "key", "value", "output"} == {path[-2] for path in learnt}
    for path in learnt:  # they start from zero: each has had a gradient, through the experts
        assert np.any(np.asarray(adapters[path].get_value())), path

    from jax_w4a8.models import default_model_path, load_model

    fresh = load_model(default_model_path())
    for layer, before in zip(model.layers, fresh.layers, strict=True):
        packed, original = (each.mlp.experts.get_value() for each in (layer, before))
        reference.assert_same_bits(packed.w13.codes, original.w13.codes)
        reference.assert_same_bits(packed.w2.scale, original.w2.scale)
