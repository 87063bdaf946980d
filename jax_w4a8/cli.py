"""The command line, ``python -m jax_w4a8``: its subcommands, and how they fail (one line, exit code 2) or are
interrupted (Ctrl-C, exit code 130).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jax_w4a8 import distributed, ffi
from jax_w4a8.bench import command as bench
from jax_w4a8.commands import evaluate, generation_flags, quantize
from jax_w4a8.experts.base import ACTIVATION_SCHEMES
from jax_w4a8.oracle import W4A8Int8MoeBackend, backend_class
from jax_w4a8.sharding import ExpertSharding

if TYPE_CHECKING:
    import jax_w4a8.models as models
    from jax_w4a8.models.plan import DecoderPlan

#: What a command may raise about its input or this machine; anything else is a fault of this package.
_EXPECTED_ERRORS = (ValueError, RuntimeError, OSError, ImportError, MemoryError)
#: What shells report of a program that Ctrl-C ended: 128 + SIGINT.
_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
      name: as typed.
      summary: one line for ``--help``.
      add_arguments: declares its arguments.
      run: does the work; returns the exit code.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a W4A8 checkpoint; default: the shipped model"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--activation-scheme", choices=ACTIVATION_SCHEMES, default="asymmetric")
    parser.add_argument("--backend", choices=["auto", *(b.value for b in W4A8Int8MoeBackend)], default="auto")
    parser.add_argument(
        "--packed-cache",
        type=Path,
        nargs="?",
        const=True,
        metavar="CACHE",
        help="keep packed weights here for the next load; default: in the user's cache directory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    generation_flags.add_arguments(parser)
    distributed.add_arguments(parser)


def _generate(arguments: argparse.Namespace) -> int:
    _require_models()
    group = distributed.asked_group(arguments)
    if group is not None:
        with distributed.membership(group):
            return _write_text(arguments, write=group.process_id == 0)
    if arguments.distributed:
        command = [sys.executable, "-m", "jax_w4a8", *arguments.argv]
        distributed.launch(command, 2 if arguments.num_processes is None else arguments.num_processes)
        return 0
    return _write_text(arguments)


def _write_text(arguments: argparse.Namespace, write: bool = True) -> int:
    """Generates; one process of a group writes what all of them make."""
    from jax_w4a8.models import default_model_path, load_model
    from jax_w4a8.models.default import DEFAULT_PROMPT
    from jax_w4a8.models.text import load_tokenizer

    path = default_model_path() if arguments.model is None else arguments.model
    prompt = DEFAULT_PROMPT if arguments.prompt is None else arguments.prompt
    tokenizer = load_tokenizer(path)
    model = load_model(
        path,
        arguments.activation_scheme,
        arguments.backend,
        packed_cache=arguments.packed_cache,
        sharding=_all_devices() if arguments.distributed else None,
    )
    stream = generation_flags.open_stream(model, tokenizer, prompt, path, arguments)
    as_text = write and not arguments.json
    if as_text:
        print(prompt, end="", flush=True)
    text = ""
    for piece in stream:
        text += piece
        if as_text:
            print(piece, end="", flush=True)
    report = {
        "prompt": prompt,
        "text": text,
        "ids": stream.ids,
        "finish_reason": stream.finish_reason,
        **_speed(model, stream.times),
    }
    if write:
        print(json.dumps(report) if arguments.json else f"\n\n{_speed_line(report)}")
    return 0


def _all_devices() -> ExpertSharding:
    """Experts over all devices of all processes, and the same bits as on one."""
    import jax

    mesh = jax.make_mesh((jax.device_count(),), ("expert",))
    return ExpertSharding(mesh, expert_axis="expert", bitwise=True)


def _speed(model: models.Decoder, times: models.GenerationTimes) -> dict[str, Any]:
    backend = model.backend
    native = backend is W4A8Int8MoeBackend.CPU_INT4
    sharding = model.options.sharding
    return {
        "shards": 1 if sharding is None else sharding.ep_size,
        "backend": backend.name,
        "instruction_set": ffi.instruction_set() if native else None,
        "threads": ffi.num_threads(),
        "activation_scheme": model.options.activation_scheme,
        "compile_seconds": round(times.compile_seconds, 3),
        "prefill_tokens": times.prefill_tokens,
        "prefill_tokens_per_second": round(times.prefill_rate, 2),
        "decode_tokens": times.decode_tokens,
        "decode_tokens_per_second": round(times.decode_rate, 2),
    }


def _speed_line(report: dict[str, Any]) -> str:
    instructions = report["instruction_set"]
    spread = f"experts on {report['shards']} devices, " if report["shards"] > 1 else ""
    return (
        f"{spread}backend {report['backend']}, "
        f"instruction set {instructions or 'chosen by XLA'}, {report['threads']} threads, "
        f"prefill {report['prefill_tokens_per_second']:.1f} tokens/s, "
        f"decode {report['decode_tokens_per_second']:.1f} tokens/s "
        f"(compiled before in {report['compile_seconds']:.1f} s)"
    )


def _evaluate(arguments: argparse.Namespace) -> int:
    _require_models()
    return evaluate.run(arguments)


def _add_info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR", help="a W4A8 checkpoint to describe"
    )


def _info(arguments: argparse.Namespace) -> int:
    if arguments.directory is None:
        _print_machine()
        return 0
    _require_models()
    from jax_w4a8.models import read_plan

    config, plan = read_plan(arguments.directory)
    _print_machine()
    print()
    _print_checkpoint(config, plan)
    return 0


def _print_machine() -> None:
    import jax

    platform = jax.default_backend()
    usable = ffi.instruction_sets()
    print(f"jax {jax.__version__} on {platform}, {ffi.num_threads()} threads")
    print(f"instruction sets: {', '.join(usable) or 'none'} (in use: {ffi.instruction_set()})")
    print("backends:")
    for backend in W4A8Int8MoeBackend:
        reason = backend_class(backend).unavailable_reason(platform)
        print(f"  {backend.name}: {'yes' if reason is None else f'no, {reason}'}")


def _print_checkpoint(config: models.DecoderConfig, plan: DecoderPlan) -> None:
    from jax_w4a8.models.describe import describe_modules

    print(f"{config.model_type}, {config.num_layers} layers, {plan.nbytes / 2**20:.1f} MB")
    rows = [("module", "shape", "scheme", "MB", "backend")]
    rows += [dataclasses.astuple(row) for row in describe_modules(config, plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _require_models() -> None:
    """Raises ImportError, with what to install, if a package that models need is missing."""
    try:
        import jax_w4a8.models  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{error}; whole models need more packages: pip install 'jax_w4a8[models]'"
        ) from error


#: Every subcommand; a new one is a line here.
COMMANDS: tuple[Command, ...] = (
    Command("generate", "continue a text", _add_generate_arguments, _generate),
    Command("eval", "measure the perplexity of a text", evaluate.add_arguments, _evaluate),
    Command("bench", "measure layers against this machine's own limits", bench.add_arguments, bench.run),
    Command(
        "quantize", "make a W4A8 checkpoint of a floating point one", quantize.add_arguments, quantize.run
    ),
    Command("info", "describe this machine, or a checkpoint", _add_info_arguments, _info),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_w4a8",
        description="Mixture-of-experts models with INT4 weights and INT8 activations, for JAX on CPUs.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _end_interrupted() -> NoReturn:
    """Ends the process as it stands, once every ``with`` block is left.

    An orderly end would wait for the other processes of a group. And jax 0.10.2 goes on with an interrupted
    compilation, on a thread that uses the client's devices after the interpreter's end freed them: SIGSEGV.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        print(file=sys.stderr, flush=True)  # what the shell writes next starts a line
    os._exit(_INTERRUPTED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code, 2 for bad input. Ctrl-C ends the process with code 130."""
    arguments = _parser().parse_args(argv)
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader had enough; it is no error of ours
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        _end_interrupted()
    except _EXPECTED_ERRORS as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return 2
    return code
