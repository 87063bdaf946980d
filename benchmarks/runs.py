"""The recorded runs, in groups that take less than eight minutes each on two cores."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Run:
    """One command.

    Attributes:
      group: what is recorded by one call of ``record.py``.
      arguments: of ``python -m jax_w4a8 bench``.
      question: what it answers, a heading of the page.
      plot: whether a roofline is drawn.
    """

    group: str
    arguments: str
    question: str
    plot: bool = False


_QWEN = "--shape qwen3-30b-a3b"
_SHAPES = ("olmoe", "gpt-oss-20b", "deepseek-v2-lite", "mixtral-8x7b")
_VNNI = "--instruction-set avx512_vnni"
#: One row where AVX-512 VNNI is the best that the machine has, else two.
_BOTH = f"{_VNNI} best"

RUNS: dict[str, Run] = {
    "qwen3-g128": Run(
        "layer",
        f"{_QWEN} --group-size 128 --routing uniform one zipf {_BOTH}",
        "One MoE layer, groups of 128, three routings",
        plot=True,
    ),
    "qwen3-g32": Run("layer", f"{_QWEN} --group-size 32 {_BOTH}", "The same, groups of 32"),
    "qwen3-channel": Run("layer", f"{_QWEN} --group-size -1 {_BOTH}", "The same, channel-wise"),
    "qwen3-threads": Run(
        "threads", f"{_QWEN} --tokens 1 16 1024 --threads 1 2 {_BOTH}", "From one thread to two"
    ),
    "qwen3-avx2": Run(
        "threads", f"{_QWEN} --tokens 1 1024 --instruction-set avx2", "AVX2 alone, without VNNI"
    ),
    **{
        f"{shape}-{'g32' if shape == 'gpt-oss-20b' else 'g128'}": Run(
            "shapes" if shape != "mixtral-8x7b" else "mixtral",
            f"--shape {shape} --group-size {32 if shape == 'gpt-oss-20b' else 128} "
            f"--tokens 1 4 16 64 1024 {_BOTH} --layers {3 if shape == 'mixtral-8x7b' else 6} --repetitions 5",
            f"Another shape: {shape}",
        )
        for shape in _SHAPES
    },
    "peer-llamacpp": Run(
        "peer-llamacpp",
        f"{_QWEN} --group-size 32 {_BOTH} --peer llama.cpp --layers 6 --repetitions 5",
        "Against llama.cpp",
        plot=True,
    ),
    "peer-zentorch": Run(
        "peer-zentorch",
        f"{_QWEN} --group-size 128 {_BOTH} --peer zentorch --layers 6 --repetitions 5",
        "Against zentorch",
        plot=True,
    ),
    "peer-onnxruntime-g128": Run(
        "peer-onnxruntime",
        f"{_QWEN} --group-size 128 {_BOTH} --peer onnxruntime --layers 6 --repetitions 5",
        "Against ONNX Runtime's QMoE",
    ),
    "peer-onnxruntime-g32": Run(
        "peer-onnxruntime",
        f"{_QWEN} --group-size 32 {_BOTH} --peer onnxruntime --layers 6 --repetitions 5",
        "Against ONNX Runtime's QMoE, groups of 32",
    ),
    "linear": Run(
        "linear",
        f"--linear 1536x2048 --group-size 32 128 {_BOTH} --peer openvino onnxruntime --repetitions 15",
        "A dense linear map, against OpenVINO and ONNX Runtime",
    ),
    "pure-jax": Run(
        "pure-jax",
        f"{_QWEN} --group-size 128 {_BOTH} --baseline scan --layers 4 --repetitions 3",
        "Against the best pure-JAX path found",
        plot=True,
    ),
    "ragged-dot": Run(
        "ragged-dot",
        f"{_QWEN} --tokens 1 16 {_BOTH} --baseline ragged_dot xla --layers 2 --repetitions 1",
        "Against jax.lax.ragged_dot",
    ),
    "model": Run(
        "model",
        f"--model qwen3-30b-a3b --head w4a8 --repetitions 3 {_VNNI}",
        "A whole model: all 48 layers of Qwen3-30B-A3B",
    ),
    "model-llamacpp": Run(
        "model-llamacpp",
        f"--model qwen3-30b-a3b --head w4a8 --layers 12 --repetitions 3 --peer llama.cpp {_VNNI}",
        "A whole model against llama.cpp, 12 of 48 layers",
    ),
    "model-best": Run(
        "model-best",
        "--model qwen3-30b-a3b --head w4a8 --repetitions 3",
        "The whole model by the machine's best instruction set",
    ),
    "model-llamacpp-best": Run(
        "model-llamacpp-best",
        "--model qwen3-30b-a3b --head w4a8 --layers 12 --repetitions 3 --peer llama.cpp",
        "Against llama.cpp by the machine's best instruction set",
    ),
}
GROUPS = tuple(dict.fromkeys(run.group for run in RUNS.values()))
