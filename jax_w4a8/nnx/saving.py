"""Saves models with packed weights by Orbax, and restores them: the layout's version travels along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx

from jax_w4a8.nnx.modules import PackedWeight
from jax_w4a8.weights import LAYOUT_VERSION, ExpertWeights, LinearWeights

_ITEMS = ("state", "packed")


def packed_metadata(model: nnx.Module) -> dict[str, Any]:
    """What the arrays of a model's packed weights mean, for JSON: the layout's version, and sizes by path.

    :func:`save` stores it; with an Orbax manager of your own, store it beside the state and hand it to
    :func:`check_packed_metadata` before you restore.
    """
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, PackedWeight)):
        weights[".".join(map(str, path))] = _sizes(variable.get_value())
    return {"layout_version": LAYOUT_VERSION, "weights": weights}


def _sizes(weights: LinearWeights | ExpertWeights) -> dict[str, int]:
    parts = {"": weights} if isinstance(weights, LinearWeights) else {"w13_": weights.w13, "w2_": weights.w2}
    names = ("out_features", "in_features", "group_size")
    return {f"{part}{name}": getattr(one, name) for part, one in parts.items() for name in names}


def check_packed_metadata(metadata: dict[str, Any], model: nnx.Module) -> None:
    """Raises ValueError unless packed weights saved with ``metadata`` mean in ``model`` what they meant.

    The message names the module and the sizes, or the two layout versions.
    """
    ours = packed_metadata(model)
    version = metadata.get("layout_version")
    if version != LAYOUT_VERSION:
        raise ValueError(
            f"the packed weights were saved in layout version {version}, this jax_w4a8 has version "
            f"{LAYOUT_VERSION}: pack them anew from the original checkpoint"
        )
    saved = metadata["weights"]
    if missing := sorted(saved.keys() ^ ours["weights"].keys()):
        raise ValueError(f"packed weights of {missing} are in only one of what was saved and the model")
    for path, sizes in ours["weights"].items():
        if saved[path] != sizes:
            raise ValueError(f"packed weights of {path!r} were saved with {saved[path]}, model has {sizes}")


def save(path: str | Path, model: nnx.Module) -> None:
    """Writes all Variables of a model to a new Orbax checkpoint directory.

    Raises:
      ValueError: the directory exists.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save(
            Path(path).absolute(),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(nnx.to_pure_dict(nnx.state(model))),
                packed=ocp.args.JsonSave(packed_metadata(model)),
            ),
        )


def restore(path: str | Path, model: nnx.Module) -> Any:
    """A model like ``model`` with the Variables that :func:`save` wrote.

    Args:
      path: the checkpoint directory.
      model: abstract, ``nnx.eval_shape(lambda: MyModel(..., rngs=nnx.Rngs(0)))``, so that nothing is
        allocated twice; a concrete one works too and is left alone. ``quantize_model`` runs inside
        ``nnx.eval_shape`` as well.

    Raises:
      ValueError: as :func:`check_packed_metadata`; also where shapes or names differ from what was saved.
      FileNotFoundError: there is no such directory.
    """
    directory = Path(path).absolute()
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    graph, state = nnx.split(model)
    with _checkpointer() as checkpointer:
        packed = checkpointer.restore(directory, args=ocp.args.Composite(packed=ocp.args.JsonRestore()))
        check_packed_metadata(packed["packed"], model)
        restored = checkpointer.restore(
            directory,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(nnx.to_pure_dict(state))),
        )
    nnx.replace_by_pure_dict(state, restored["state"])
    return nnx.merge(graph, state)


def _checkpointer() -> Any:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(*_ITEMS))
