"""ggml's CPU backend by ctypes, from the libraries that llama-cpp-python brings."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from jax_w4a8.bench.work import Array

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_INT64 = ctypes.c_int64

F32, I32 = 0, 26
TYPES = {"q4_0": 2, "q4_K": 12}


_LogCallback = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _POINTER)
#: Kept here, since ggml keeps a pointer to it.
_QUIET = _LogCallback(lambda level, text, data: None)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


#: Result and argument types of every function used.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_log_set": (None, (_LogCallback, _POINTER)),
    "ggml_init": (_POINTER, (_InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead_custom": (_SIZE, (_SIZE, ctypes.c_bool)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, _INT, _INT64, _INT64)),
    "ggml_new_tensor_3d": (_POINTER, (_POINTER, _INT, _INT64, _INT64, _INT64)),
    "ggml_reshape_3d": (_POINTER, (_POINTER, _POINTER, _INT64, _INT64, _INT64)),
    "ggml_view_2d": (_POINTER, (_POINTER, _POINTER, _INT64, _INT64, _SIZE, _SIZE)),
    "ggml_mul_mat": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_mul_mat_id": (_POINTER, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "ggml_swiglu_split": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_mul": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_add": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_set_input": (None, (_POINTER,)),
    "ggml_set_output": (None, (_POINTER,)),
    "ggml_new_graph_custom": (_POINTER, (_POINTER, _SIZE, ctypes.c_bool)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_nbytes": (_SIZE, (_POINTER,)),
    "ggml_backend_cpu_init": (_POINTER, ()),
    "ggml_backend_free": (None, (_POINTER,)),
    "ggml_backend_cpu_set_n_threads": (None, (_POINTER, _INT)),
    "ggml_backend_cpu_buffer_type": (_POINTER, ()),
    "ggml_backend_cpu_reg": (_POINTER, ()),
    "ggml_backend_reg_get_proc_address": (_POINTER, (_POINTER, ctypes.c_char_p)),
    "ggml_backend_reg_dev_get": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, (_POINTER, _POINTER)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
    "ggml_backend_buffer_set_usage": (None, (_POINTER, _INT)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_POINTER,)),
    "ggml_gallocr_new": (_POINTER, (_POINTER,)),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, (_POINTER, _POINTER)),
    "ggml_gallocr_free": (None, (_POINTER,)),
    "ggml_backend_tensor_set": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_backend_tensor_get": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_backend_graph_compute": (_INT, (_POINTER, _POINTER)),
}


@functools.cache
def library() -> Any:
    """An object with ggml's functions as attributes."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise ImportError("llama_cpp is not installed")
    folder = Path(spec.origin).parent / "lib"
    parts = [
        ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu", "ggml")
    ]
    found = type("Ggml", (), {})()
    for name, (result, arguments) in _SIGNATURES.items():
        function = next((getattr(part, name) for part in parts if hasattr(part, name)), None)
        if function is None:
            raise ImportError(f"llama_cpp's ggml has no function {name}: another version is needed")
        function.restype, function.argtypes = result, list(arguments)
        setattr(found, name, function)
    found.ggml_log_set(_QUIET, None)
    return found


def context(tensors: int, graph_nodes: int = 0) -> Any:
    """Room for so many tensors' descriptions, and a graph's; no data."""
    g = library()
    size = g.ggml_tensor_overhead() * tensors
    if graph_nodes:
        size += g.ggml_graph_overhead_custom(graph_nodes, False)
    return g.ggml_init(_InitParams(size, None, True))


def buffer_type(repacked: bool) -> Any:
    """The plain buffer of the CPU, or the one that repacks weights for its instruction set.

    Raises:
      RuntimeError: this build has no repacking.
    """
    g = library()
    if not repacked:
        return g.ggml_backend_cpu_buffer_type()
    registry = g.ggml_backend_cpu_reg()
    address = g.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        raise RuntimeError("this build of ggml has no extra buffer types")
    device = g.ggml_backend_reg_dev_get(registry, 0)
    types = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)(device)
    index = 0
    while types and types[index]:
        if b"REPACK" in g.ggml_backend_buft_name(types[index]):
            return types[index]
        index += 1
    raise RuntimeError("this build of ggml doesn't repack weights")


def write(tensor: Any, values: Array) -> None:
    """Copies (and repacks) values into a tensor; ValueError unless the sizes agree."""
    g = library()
    values = np.ascontiguousarray(values)
    if g.ggml_nbytes(tensor) != values.nbytes:
        raise ValueError(f"a tensor of {g.ggml_nbytes(tensor)} bytes can't take {values.nbytes}")
    g.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


def read(tensor: Any, shape: tuple[int, ...]) -> Array:
    """float32 values of a tensor."""
    values = np.empty(shape, np.float32)
    library().ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
    return values
