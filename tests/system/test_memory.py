"""Memory of this process as the system counts it."""

import mmap
import sys
import time

import pytest
import torch

from msrnn.system.memory import Peak, physical, resident

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


def test_physical_memory_is_more_than_this_process_uses() -> None:
    assert resident() < physical()
