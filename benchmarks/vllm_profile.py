"""Where the time of one layer's prompt goes inside vLLM, without vLLM: blocks and metadata as vLLM makes them.

    python benchmarks/vllm_profile.py --out results/vllm_profile.jsonl          # on a GPU, with nothing beside it
    python benchmarks/vllm_profile.py --start --out results/vllm_profile.jsonl  # what is compiled at the start
    python benchmarks/vllm_profile.py --small --device cpu                      # to try it

One request reads 4,096 tokens from its first on, or the next 8,192 of a long text (vLLM's batch); 16 requests read 512
each, or 32 requests 256. For every case: milliseconds of one layer as the host sees it, the sum of its kernels' times,
the number of kernels, and the kernels that take most, for several lengths of a chunk, launched one by one and as CUDA
graphs. Where the wall time is far above the kernels' sum, the host is the limit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.policy import parse_policy
from msrnn.system.provenance import command, commit, machine, now, versions
from msrnn.vllm import batch as batches
from msrnn.vllm import read_graphs, reads, warmup
from msrnn.vllm.batch import attend, batch_of
from msrnn.vllm.block import Layout

LAYERS = 4  # different memory each, as in a model
HEADS, KV_HEADS, SIZE = 32, 8, 128


class Case(NamedTuple):
    """So many requests, each with so many new tokens after so many."""

    rows: int
    new: int
    seen: int
    chunk: int = 256
    attention: str = "steady"
    graphs: bool = False
    block: int = 16  # rows that the scan prepares at a time

    @property
    def name(self) -> str:
        notes = (", CUDA graphs" if self.graphs else "") + (f", blocks of {self.block}" if self.block != 16 else "")
        return f"{self.rows} x {self.new} after {self.seen}, chunk {self.chunk}, {self.attention}{notes}"


CASES = [
    Case(1, 4096, 0),
    Case(1, 4096, 0, graphs=True),
    Case(1, 8192, 8192),
    Case(1, 8192, 8192, graphs=True),
    Case(16, 512, 1024),
    Case(16, 512, 1024, graphs=True),
    Case(32, 256, 1024),
    Case(32, 256, 1024, graphs=True),
    Case(1, 4096, 0, graphs=True, block=8),
    Case(1, 8192, 8192, graphs=True, block=8),
    Case(1, 4096, 0, graphs=True, block=4),
    Case(1, 8192, 8192, graphs=True, block=4),
    Case(4, 2048, 1024),
    Case(4, 2048, 1024, graphs=True),
    Case(14, 512, 1024, graphs=True),
    Case(1, 4096, 0, attention="flat"),
    Case(1, 4096, 0, attention="flat", graphs=True),
    Case(1, 8192, 8192, chunk=512, graphs=True),
    Case(1, 8192, 8192, chunk=128, graphs=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--policy", default="tova:512")
    parser.add_argument("--start", action="store_true", help="instead: what is compiled before the first request")
    parser.add_argument("--small", action="store_true", help="a 32nd of the tokens")
    parser.add_argument("--seconds", type=float, default=600, help="no further case after so long")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin, device = time.monotonic(), torch.device(options.device)
    sizes_of = batches.sizes_of
    batches.sizes_of = lambda *arguments: sizes_of(*arguments)._replace(gpu=True)  # also where this is tried
    about = {"date": now(), "commit": options.commit or commit(), "machine": machine(device), "versions": versions()}
    about |= {"command": command(), "kind": "vllm profile", "policy": options.policy, "small": options.small}
    if options.start:
        write(options.out, about | {"kind": "vllm warm-up"} | warm_up(options, device))
        return
    for case in CASES:
        if time.monotonic() - begin > options.seconds:
            print(f"no time left for {case.name}", flush=True)
            continue
        if options.small:
            case = case._replace(
                new=case.new // 32, seen=case.seen // 32, rows=min(2, case.rows), chunk=case.chunk // 32
            )
        record = measure(case, options.policy, device)
        show(record)
        write(options.out, about | record)


def write(path: Path | None, record: dict[str, Any]) -> None:
    if path:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def warm_up(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of the warm-up in vLLM's memory profile, and of every kernel that Triton compiled in it."""
    import triton

    compiled: list[dict[str, Any]] = []
    last = [time.perf_counter()]

    def before(**about: Any) -> None:
        last[0] = time.perf_counter()

    def after(*, fn: Any, compile: dict[str, Any], **about: Any) -> None:
        seconds = time.perf_counter() - last[0]
        shown = {name: str(compile.get(name))[:300] for name in ("num_warps", "constants", "configs")}
        compiled.append({"name": fn.name, "seconds": round(seconds, 3)} | shown)

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
    policy, attention = parse_policy(options.policy), Attention(SIZE**-0.5)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    new = tokens(Case(1, 8192 // (32 if options.small else 1), 0), dtype, device)
    begin = time.perf_counter()
    warmup.warm_up(Layout(policy, HEADS, KV_HEADS, SIZE, SIZE, dtype), *new, attention, 16 if options.small else 512)
    if device.type == "cuda":
        torch.cuda.synchronize()
    total = time.perf_counter() - begin
    print(f"warm-up {total:.1f} s, {len(compiled)} kernels compiled in {sum(k['seconds'] for k in compiled):.1f} s")
    for kernel in compiled:
        print(
            f"    {kernel['seconds']:6.2f} s {kernel['name']} {kernel['num_warps']} {kernel['constants'][:150]}",
            flush=True,
        )
    return {"seconds": total, "compiled": compiled, "parts": dict(warmup.seconds)}


def measure(case: Case, policy_text: str, device: torch.device) -> dict[str, Any]:
    reads.TAILS = (case.chunk // 4, case.chunk)
    reads.GRAPHS = tuple(case.chunk << power for power in range(6 if case.chunk == 256 else 7))
    read_graphs._graphs.clear()
    if device.type == "cuda":
        from msrnn.kernels.triton import scan

        scan._ROWS = case.block
    policy, attention = parse_policy(policy_text), Attention(SIZE**-0.5)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = Layout(policy, HEADS, KV_HEADS, SIZE, SIZE, dtype)
    new = tokens(case, dtype, device)
    begin = time.perf_counter()
    if case.graphs:
        shapes = [shape for shape in reads.graph_shapes(len(new[0])) if shape[0] <= case.rows]
        read_graphs.capture(filled(layout, 1, device), new, policy, attention, shapes, case.chunk)
    capture_s = time.perf_counter() - begin
    layers = [filled(layout, case.rows + 1, device) for _ in range(LAYERS)]
    index = torch.arange(1, case.rows + 1, device=device)
    seen, starts = [case.seen] * case.rows, [case.new * row for row in range(case.rows + 1)]
    output = torch.empty_like(new[0])

    def call() -> None:
        batch = batch_of(index, torch.tensor(seen, device=device), starts, seen)
        for blocks in layers:
            attend(blocks, batch, *new, policy, attention, output)

    wall, kernels = timed(call, device), profiled(call, device)
    record = case._asdict() | {"name": case.name, "wall_ms": wall / LAYERS, "capture_s": capture_s, "layers": LAYERS}
    record |= {"kernels_ms": sum(row["ms"] for row in kernels) / LAYERS}
    record |= {"launches": sum(row["count"] for row in kernels) / LAYERS, "kernels": kernels[:24]}
    return record | {"checksum": float(output.float().abs().sum())}


def tokens(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value; `steady`: as the model of `vllm_gpu.py`, a token's weight is similar from row to row."""
    generator = torch.Generator(device=device).manual_seed(0)
    count = case.rows * case.new

    def noise(heads: int) -> Tensor:
        return 1.28 * torch.randn(count, heads, SIZE, device=device, generator=generator)

    query, key, value = noise(HEADS), noise(KV_HEADS), noise(KV_HEADS)
    if case.attention == "steady":
        half = query.view(count, HEADS, 2, SIZE // 2)
        half[..., SIZE // 2 * 5 // 8 :] += 4 * torch.randn(
            HEADS, 2, SIZE // 2 - SIZE // 2 * 5 // 8, device=device, generator=generator
        )
    return query.to(dtype), key.to(dtype), value.to(dtype)


def filled(layout: Layout, count: int, device: torch.device) -> Slots:
    """Blocks whose slots are all in use but the last."""
    blocks = layout.carve(torch.zeros(count, 1, 1, layout.nbytes, dtype=torch.uint8, device=device).view(layout.dtype))
    slots, generator = blocks.positions.shape[2], torch.Generator(device=device).manual_seed(1)
    for part in (blocks.keys, blocks.values):
        part.copy_(torch.randn(part.shape[1:], device=device, generator=generator).mul_(1.28).expand_as(part))
    blocks.positions.copy_(torch.arange(slots, device=device).expand_as(blocks.positions))
    blocks.positions[:, :, -1] = -1
    blocks.next.fill_(slots - 1)
    return blocks


def timed(call: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    """Milliseconds of a call as the host sees it, the median after two that compile."""
    times = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return median(times[2:])


def profiled(call: Callable[[], None], device: torch.device) -> list[dict[str, Any]]:
    """Every kernel with its number and milliseconds, those that take most first."""
    if device.type != "cuda":
        return []
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    rows = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    rows.sort(key=lambda event: -event.self_device_time_total)
    return [{"name": row.key, "count": row.count, "ms": row.self_device_time_total / 1e3} for row in rows]


def show(record: dict[str, Any]) -> None:
    chunks = record["rows"] and max(1, record["new"] // record["chunk"])
    print(
        f"{record['name']}: {record['wall_ms']:.2f} ms a layer, kernels {record['kernels_ms']:.2f} ms in "
        f"{record['launches']:.0f}; a chunk {1e3 * record['wall_ms'] / chunks:.0f} us; captured in "
        f"{record['capture_s']:.1f} s; checksum {record['checksum']:.6g}",
        flush=True,
    )
    for row in record["kernels"][:10]:
        print(f"    {row['ms'] / LAYERS:8.3f} ms {row['count'] / LAYERS:6.1f} x {row['name'][:90]}", flush=True)


if __name__ == "__main__":
    main()
