"""The cache of packed models: one file for each checkpoint directory, mapped into memory by the next load."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from jax_w4a8.checkpoint.identity import source_identity
from jax_w4a8.checkpoint.packed_file import UnusableFileError, read_packed_file, write_packed_file
from jax_w4a8.checkpoint.reader import CONFIG_FILE
from jax_w4a8.models.plan import DecoderPlan
from jax_w4a8.models.progress import Progress
from jax_w4a8.weights import LAYOUT_VERSION

logger = logging.getLogger(__name__)


class Stored(Protocol):
    """A module as a checkpoint stores it."""

    @property
    def name(self) -> str:
        """Unique in its model."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        ...


class MissingModuleError(LookupError):
    """The cache lacks a module that the model has."""


class ModuleStore:
    """Gives a builder its modules: made from the checkpoint, and remembered if they are to be cached."""

    def __init__(self, advance: Progress, *, remember: bool = False) -> None:
        self._advance = advance
        self._remember = remember
        self.made: dict[str, Any] = {}

    def get(self, stored: Stored, make: Callable[[Progress], Any]) -> Any:
        """The module ``stored``; ``make`` reads it and is told whom to tell of its progress."""
        value = make(self._advance)
        if self._remember:
            self.made[stored.name] = value
        return value


class CachedModules(ModuleStore):
    """Gives a builder modules from a cache, and reads nothing."""

    def __init__(self, advance: Progress, modules: dict[str, Any]) -> None:
        super().__init__(advance)
        self._modules = modules

    def get(self, stored: Stored, make: Callable[[Progress], Any]) -> Any:
        """See :meth:`ModuleStore.get`; raises MissingModuleError if the cache lacks it."""
        if stored.name not in self._modules:
            raise MissingModuleError(stored.name)
        self._advance(stored.nbytes)
        return self._modules[stored.name]


@dataclasses.dataclass(frozen=True)
class PackedCache:
    """Where packed models are kept, and how far they are trusted.

    A cached model is used only if its header is whole, its size right, its layout that of this package, and
    the checkpoint's files (names, sizes, times of change, hashes of their headers and of ``config.json``)
    those that it was made from. Anything else is built anew, with a warning.

    Attributes:
      directory: holds one file for each checkpoint. None: ``jax_w4a8`` in the user's cache directory.
      verify: read the whole file at every load, and compare checksums.
    """

    directory: str | os.PathLike[str] | None = None
    verify: bool = False

    def file_for(self, checkpoint: Path) -> Path:
        """The file that keeps the checkpoint in the directory ``checkpoint`` packed."""
        path = checkpoint.resolve()
        place = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        directory = _user_cache() if self.directory is None else Path(self.directory)
        return directory / f"{path.name}-{place}-v{LAYOUT_VERSION}.packed.safetensors"


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jax_w4a8"


def as_packed_cache(value: bool | str | os.PathLike[str] | PackedCache | None) -> PackedCache | None:
    """What ``load_model`` takes as ``packed_cache``, as a :class:`PackedCache`; None for no cache.

    Raises:
      TypeError: it is something else.
    """
    if value is None or value is False:
        return None
    if value is True:
        return PackedCache()
    if isinstance(value, PackedCache):
        return value
    if isinstance(value, str | os.PathLike):
        return PackedCache(value)
    raise TypeError(f"packed_cache must be a directory, a bool or a PackedCache, got {type(value).__name__}")


class CacheEntry:
    """One checkpoint's place in a cache."""

    def __init__(self, cache: PackedCache, plan: DecoderPlan) -> None:
        files = plan.embedding.files
        self._verify = cache.verify
        self._path = cache.file_for(files.directory)
        self._source = source_identity(files, [files.directory / CONFIG_FILE])

    def read(self) -> dict[str, Any] | None:
        """The cached modules by name, or None if there are none to be trusted."""
        try:
            return read_packed_file(self._path, self._source, verify=self._verify)
        except FileNotFoundError:
            logger.info("%s is not there yet", self._path)
        except UnusableFileError as error:
            logger.warning("packed weights are built anew, %s can't be used: %s", self._path, error)
        return None

    def refuse(self, module: str) -> None:
        """Notes that the cache doesn't fit this package's model."""
        logger.warning("packed weights are built anew, %s has no module %r", self._path, module)

    def write(self, modules: dict[str, Any]) -> None:
        """Writes the cache; where that fails, a warning says so."""
        try:
            write_packed_file(self._path, self._source, modules)
        except OSError as error:
            logger.warning("packed weights were not cached: %s", error)
