"""Compiled work on several threads, also where OpenMP binds PyTorch's own to a core each, as vLLM's workers do."""

import os
import subprocess
import sys

import pytest

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
PROGRAM = """
import os, threading, time, torch
from msrnn.kernels.numba.threads import WORTHWHILE, parallel_for

(torch.ones(500, 500) @ torch.ones(500, 500)).sum()
creator, ran = os.sched_getaffinity(0), {}

def work(row, unit):
    ran[threading.get_ident()] = os.sched_getaffinity(0)
    time.sleep(0.2)

parallel_for(work, [(0, 0), (0, 1), (0, 2), (0, 3)], WORTHWHILE)
ran.pop(threading.get_ident())
print(len(creator), *(len(cores) for cores in ran.values()))
"""


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores, and Linux")
def test_threads_do_not_share_the_core_of_their_creator():
    bound = {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OMP_PROC_BIND": "true",
        "GOMP_CPU_AFFINITY": f"{CORES[0]} {CORES[1]}",
    }
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(command, env=os.environ | bound, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1", "2"], "OpenMP binds this thread to one core, the pool's may run on both"
