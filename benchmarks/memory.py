"""Peak memory of quantising and of loading a checkpoint that is large beside what it should take.

    python benchmarks/memory.py DIRECTORY [--gib 6] [--scale absmax] [--json FILE]

Writes a random Qwen3-MoE of so many GiB into DIRECTORY (which must be new; it is removed at the end),
quantises it and loads the result, each in a process of its own, and prints the peak of resident memory that
the operating system
counted beside its bound: for quantising, a constant; for loading, the packed weights and a constant.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jax_w4a8.checkpoint.writer import SafetensorsWriter, TensorSpec

HIDDEN, INNER, EXPERTS, VOCABULARY = 2048, 768, 64, 32768
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
MIB = 1 << 20
#: What a process takes that imports JAX and handles pieces of 16 MB in float32.
QUANTIZE_BOUND_MIB = 768
#: Beside the packed weights: JAX, one expert, one piece.
LOAD_BOUND_MIB = 512

_QUANTIZE = """
from jax_w4a8.checkpoint.quantizer import QuantizeOptions, quantize_checkpoint
quantize_checkpoint(source, target, QuantizeOptions(128, scale=scale))
nbytes = 0
"""
_LOAD = """
import jax
from flax import nnx
from jax_w4a8.models import load_model
model = load_model(target)
nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
"""
_MEASURE = """
import json, resource, sys, time
source, target, scale = sys.argv[1:]
start = time.perf_counter()
{body}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"peak_mib": peak, "seconds": time.perf_counter() - start, "weights_mib": nbytes / 2**20}}))
"""


def layer_specs(layer: int) -> list[TensorSpec]:
    """The tensors of one layer."""
    prefix = f"model.layers.{layer}"
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes[f"mlp.experts.{expert}.gate_proj"] = (INNER, HIDDEN)
        shapes[f"mlp.experts.{expert}.up_proj"] = (INNER, HIDDEN)
        shapes[f"mlp.experts.{expert}.down_proj"] = (HIDDEN, INNER)
    return [TensorSpec(f"{prefix}.{name}.weight", shape, "BF16") for name, shape in shapes.items()]


def write_model(directory: Path, gib: float) -> int:
    """Writes shards of one layer each; returns the bytes of all tensors."""
    layers = max(1, round(gib * 2**30 / sum(spec.nbytes for spec in layer_specs(0))))
    tables = [
        TensorSpec(f"{n}.weight", (VOCABULARY, HIDDEN), "BF16") for n in ("model.embed_tokens", "lm_head")
    ]
    shards = [[*tables, TensorSpec("model.norm.weight", (HIDDEN,), "BF16")]]
    shards += [layer_specs(layer) for layer in range(layers)]
    noise = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    directory.mkdir()
    for number, specs in enumerate(shards):
        file = directory / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        with SafetensorsWriter(file, specs) as writer:
            for spec in specs:
                size = int(np.prod(spec.shape))
                for start in range(0, size, noise.size):
                    writer.write(spec.name, noise[: min(noise.size, size - start)])
            writer.commit()
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": INNER,
        "hidden_act": "silu",
        "norm_topk_prob": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return sum(spec.nbytes for specs in shards for spec in specs)


def measure(body: str, source: Path, target: Path, scale: str) -> dict[str, Any]:
    """Runs ``body`` in a process of its own."""
    code = _MEASURE.format(body=body)
    run = [sys.executable, "-c", code, str(source), str(target), scale]
    result: dict[str, Any] = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=float, default=6.0)
    parser.add_argument("--scale", choices=("absmax", "mse"), default="absmax")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.directory.mkdir()
    source, target = arguments.directory / "float", arguments.directory / "w4a8"
    try:
        begun = time.perf_counter()
        size = write_model(source, arguments.gib) / MIB
        print(f"{size / 1024:.2f} GiB written in {time.perf_counter() - begun:.0f} s\n", flush=True)
        quantized = measure(_QUANTIZE, source, target, arguments.scale)
        loaded = measure(_LOAD, source, target, arguments.scale)
    finally:
        shutil.rmtree(arguments.directory)
    bounds = {"quantise": QUANTIZE_BOUND_MIB, "load": LOAD_BOUND_MIB + loaded["weights_mib"]}
    print("| step | peak | bound | seconds |\n| --- | --- | --- | --- |")
    for name, found in (("quantise", quantized), ("load", loaded)):
        print(f"| {name} | {found['peak_mib']:.0f} MiB | {bounds[name]:.0f} MiB | {found['seconds']:.0f} |")
    if arguments.json:
        found = {"checkpoint_mib": size, "bounds_mib": bounds, "quantise": quantized, "load": loaded}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    if quantized["peak_mib"] > bounds["quantise"] or loaded["peak_mib"] > bounds["load"]:
        raise SystemExit("a bound doesn't hold")


if __name__ == "__main__":
    main()
