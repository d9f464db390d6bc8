"""Which kernels a load of benchmarks/vllm_gpu.py takes: in steps that read prompts, and in steps where all write.

A few steps of each kind run under PyTorch's profiler, the first when half of the requests have their first token. Then
the load is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

STEPS = 6  # of each kind
SKIP = 4  # steps of writing before those that are looked at
_MOST = 16  # kernels of a record


def kernels_of(engine: Any, requests: list[str]) -> Iterator[dict[str, Any]]:
    """`requests` wait in the engine -> for each kind of step its milliseconds, and those of its kernels."""
    first: set[str] = set()

    def step() -> None:
        first.update(answer.request_id for answer in engine.step())

    while 2 * len(first) < len(requests) - 1:
        step()
    yield _profiled(step, lambda: len(first) < len(requests)) | {"steps": "read prompts"}
    while len(first) < len(requests):
        step()
    for _ in range(SKIP):
        step()
    if engine.has_unfinished_requests():
        yield _profiled(step, engine.has_unfinished_requests) | {"steps": "all write"}
    engine.abort_request(requests)


def _profiled(step: Any, going_on: Any) -> dict[str, Any]:
    """As many steps as there are, STEPS at most. Kernels of several streams may add up to more than the step."""
    gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    wait = torch.cuda.synchronize if gpu else (lambda: None)
    wait()
    count = 0
    with torch.profiler.profile(activities=[activity]) as profile:
        begin = time.perf_counter()
        while count < STEPS and (not count or going_on()):
            step()
            count += 1
        wait()
        wall = time.perf_counter() - begin
    name = "self_device_time_total" if gpu else "self_cpu_time_total"
    rows = sorted(profile.key_averages(), key=lambda row: -getattr(row, name))
    kernels = [
        {"name": row.key[:160], "count": row.count / count, "ms": round(getattr(row, name) / 1e3 / count, 4)}
        for row in rows[:_MOST]
    ]
    total = sum(getattr(row, name) for row in rows) / 1e3 / count
    return {
        "profiled": count,
        "step_ms": round(1e3 * wall / count, 3),
        "kernels_ms": round(total, 3),
        "kernels": kernels,
    }
