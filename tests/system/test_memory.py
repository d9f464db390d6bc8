"""Memory of this process as the system counts it."""

import mmap
import sys
import time

import pytest
import torch

from msrnn.system import memory
from msrnn.system.memory import Peak, cgroup_limits, physical, resident, usable

MIB = 1 << 20


def test_peak_sees_memory_that_came_and_went() -> None:
    with Peak() as peak:
        block = torch.ones(16 * MIB)  # 64 MiB
        time.sleep(0.05)
        del block
    assert 50 * MIB < peak.bytes < 120 * MIB
    with Peak() as peak:
        time.sleep(0.02)
    assert peak.bytes < 8 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts pages of files apart")
def test_pages_of_mapped_files_do_not_count(tmp_path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * (64 * MIB))
    before = resident()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        assert sum(pages[:: mmap.PAGESIZE]) == ord("x") * (64 * MIB // mmap.PAGESIZE)  # every page is in memory now
        assert resident() - before < 16 * MIB


@pytest.mark.parametrize(
    "groups, files, limits",
    [
        ("0::/", {"memory.max": "1024\n"}, [1024]),
        ("0::/", {"memory.max": "max\n"}, []),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "2048", "memory.max": "4096"}, [2048, 4096]),
        ("1:cpu:/x\n4:cpu,memory:/x\n0::/\n", {"memory/memory.limit_in_bytes": "512"}, [512]),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "256", "x/memory.max": "1"}, [256]),
        ("4:memory:/x\n", {}, []),
        (None, {"memory.max": "1024"}, []),
    ],
    ids=["version 2", "no limit", "groups within groups", "version 1", "a path", "no folder", "no Linux"],
)
def test_the_limits_of_a_container(tmp_path, monkeypatch, groups, files, limits) -> None:
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    assert cgroup_limits(tmp_path) == limits
    monkeypatch.setattr(memory, "cgroup_limits", lambda: limits)
    assert usable() == min([physical(), *limits])


def test_physical_memory_is_more_than_this_process_uses() -> None:
    assert resident() < physical()
