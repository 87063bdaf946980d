"""How much memory there is, and how much of it this process may still take."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
#: Of a memory controller, by the version of Linux's control groups: limit, use, and the cache of files that
#: counts as use but is given up when memory runs short.
_GROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def physical_bytes() -> int:
    """The machine's memory; 0 where the system doesn't say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def available_bytes(root: Path = ROOT) -> int:
    """Memory that this process can take without swapping or being killed.

    The least of what the system has free, what the address space's limit (``ulimit -v``) leaves and what
    control groups, such as a container's, leave.

    Args:
      root: where ``proc`` and ``sys`` are.
    """
    return min(_free_bytes(root), _address_space_left(root), *_groups_left(root))


def _free_bytes(root: Path) -> int:
    for line in _lines(root / "proc" / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return physical_bytes()


def _address_space_left(root: Path) -> int:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages = _lines(root / "proc" / "self" / "statm")
    if limit == resource.RLIM_INFINITY or not pages:
        return sys.maxsize
    return max(0, limit - int(pages[0].split()[0]) * resource.getpagesize())


def _groups_left(root: Path) -> Iterator[int]:
    """What each control group of this process leaves, those around it included."""
    mount = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        version = 1 if controllers else 2
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mount / "memory" if version == 1 else mount
        group = top / path.lstrip("/")
        # A container may see its own group as the top one, and not the path that leads to it.
        for place in (group, *group.parents):
            yield _group_left(place, version)
            if place == top:
                break


def _group_left(place: Path, version: int) -> int:
    limit_file, use_file, cache_key = _GROUP_FILES[version]
    limit, use = _lines(place / limit_file), _lines(place / use_file)
    if not limit or not use or limit[0] == "max":
        return sys.maxsize
    facts = dict(line.split(" ", 1) for line in _lines(place / "memory.stat"))
    return max(0, int(limit[0]) - int(use[0]) + int(facts.get(cache_key, 0)))


def _lines(file: Path) -> list[str]:
    """Of a file that need not be there, or not for us."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
