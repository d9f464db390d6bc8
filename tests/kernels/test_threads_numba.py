"""Work shared out over threads: every task once, whatever the number of threads, and errors are not lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from msrnn.kernels.numba.threads import WORTHWHILE, parallel_for, units_of


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_task_is_a_row_and_a_unit() -> None:
    assert units_of(torch.zeros(2, 3, 7)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("rows, units", [(1, 1), (1, 3), (40, 50)])
@pytest.mark.parametrize("elements", [0, WORTHWHILE])
def test_each_task_runs_once(threads: int, rows: int, units: int, elements: int) -> None:
    tasks, runs, names = units_of(torch.zeros(rows, units, 1)), [], set()

    def work(row: int, unit: int, extra: str) -> None:
        runs.append((row, unit, extra))  # appending to a list is atomic
        names.add(threading.current_thread().name)

    parallel_for(work, tasks, elements, "extra")
    assert Counter(runs) == Counter((row, unit, "extra") for row, unit in tasks)
    if elements < WORTHWHILE or threads == 1:
        assert names == {threading.current_thread().name}, "too little work to wake others"


def test_several_threads_take_part(threads: int) -> None:
    """As many tasks as threads, each of which waits for all the others."""
    barrier = threading.Barrier(threads, timeout=60)
    parallel_for(lambda row, unit: barrier.wait(), [(0, unit) for unit in range(threads)], WORTHWHILE)


def test_an_error_reaches_the_caller(threads: int) -> None:
    def work(row: int, unit: int) -> None:
        raise RuntimeError(f"task {unit}")

    with pytest.raises(RuntimeError, match="task"):
        parallel_for(work, [(0, unit) for unit in range(7)], WORTHWHILE)
