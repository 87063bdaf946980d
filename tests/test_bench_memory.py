"""What memory a benchmark may take: the least that the system, limits and control groups leave."""

from __future__ import annotations

import sys

import pytest

from jax_w4a8.bench import memory

GIB = 1 << 30


def lay_out(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path):
    """A system with 6 GiB free and a process of 256 pages, in no control group."""
    lay_out(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {6 << 20} kB\n",
            "proc/self/statm": "256 100 10 1 0 50 0\n",
        },
    )
    return tmp_path


def test_without_limits_it_is_what_the_system_has_free(root):
    assert memory.available_bytes(root) == 6 * GIB


def test_where_the_system_does_not_say_it_is_all_there_is(tmp_path):
    assert memory.available_bytes(tmp_path) == memory.physical_bytes()


def test_this_system_has_some():
    assert 0 < memory.available_bytes() <= memory.physical_bytes()


def test_address_space_limit(root, monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (3 * GIB, resource.RLIM_INFINITY))
    assert memory.available_bytes(root) == 3 * GIB - 256 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 4096))
    assert memory.available_bytes(root) == 0


@pytest.mark.parametrize(
    ("files", "left"),
    [
        pytest.param(
            {
                "proc/self/cgroup": "0::/jobs/mine\n",
                "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
                "sys/fs/cgroup/jobs/mine/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/jobs/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/jobs/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/jobs/memory.stat": f"anon 5\nfile 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
            id="v2, the limit is of the group around it",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": "cache 1\ntotal_inactive_file 4096\n",
            },
            GIB + 4096,
            id="v1, in a container that sees its group as the top one",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{sys.maxsize // 4096 * 4096}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            6 * GIB,
            id="v1, no limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/mine\n",
                "sys/fs/cgroup/mine/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/mine/memory.current": f"{2 * GIB}\n",
            },
            0,
            id="v2, more in use than allowed",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:cpu:/others\n3:memory:/\n",
                "sys/fs/cgroup/memory/others/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/others/memory.usage_in_bytes": "0\n",
            },
            6 * GIB,
            id="v1, a memory group that is named as ours is for the processor",
        ),
    ],
)
def test_control_groups(root, files, left):
    lay_out(root, files)
    assert memory.available_bytes(root) == left
