"""What the vLLM backend does with its tensors, on any device and without vLLM: is it right, how long does a step take?

    PYTHONPATH=src python benchmarks/vllm_backend.py --device cuda --out results/vllm_backend.jsonl
    PYTHONPATH=src python benchmarks/vllm_backend.py --device cpu --time 9,3,64,256,2176,1,8,32

`check` drives `msrnn.vllm.batch`, which is all that a layer runs inside vLLM, with blocks and metadata as vLLM makes
them: requests of unequal length in scattered blocks, prompts in pieces, mixed batches, and single tokens in a batch of
fixed shape with padded rows (on a GPU a CUDA graph). Every output is compared with one undisturbed reading of the same
text. `timed` measures a batch of steps, the bytes that it must read, and attention to a full cache.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from msrnn.core.attention import Attention
from msrnn.core.heads import LayerSlots, empty_slots, parts_of
from msrnn.core.heads import read as read_text
from msrnn.plan import LayerPolicy, parse_layer_policy, parts
from msrnn.system.provenance import command, commit, machine, now, versions
from msrnn.vllm.batch import Batch, StaticInputs, attend, batch_of
from msrnn.vllm.block import Layout

HEADS, KV_HEADS, SIZE = 6, 3, 64
POLICIES = (
    *("tova:48", "tova-head:48", "tova-query-head:48", "window+4:48"),
    *("h2o:48", "h2o-layer:48", "fade:48", "tova+2:48,last=8,momentum=0.5"),
    *("tova:48,gain=value_norm", "h2o:48,gain=value_norm"),
    *("fade:48|fade:20|fade:31", "tova-head:30|tova-head:48|h2o:7,kv=int8"),
)
SHAPES = {"cuda": "32,8,128,1024,16384,1,32,128", "cpu": "9,3,64,256,2176,1,8"}
LAYERS = 8  # different memory each, so that nothing is left in a cache from one to the next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time", help="heads,kv_heads,head_size,capacity,context,batch,batch,...")
    parser.add_argument("--out", type=Path, help="records are added to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [check(policy, device) for policy in POLICIES]
    if device.type == "cuda":  # half precision has kernels of its own, also for prompts that fit
        rows += [
            check(policy, device, torch.bfloat16) for policy in (*POLICIES, "tova:120", "tova:120,gain=value_norm")
        ]
    shape = [int(number) for number in (options.time or SHAPES[device.type]).split(",")]
    rows += [timed(shape, batch, device) for batch in shape[5:]]
    about = {"date": now(), "commit": commit(), "machine": machine(device), "versions": versions()}
    about |= {"command": command()}
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(about | row) + "\n" for row in rows)
    failed = [row["policy"] for row in rows if not row.get("right", True)]
    if failed:
        raise SystemExit(f"wrong: {failed}")


def blocks_of(
    policy: LayerPolicy, shape: tuple[int, int, int], count: int, dtype: torch.dtype, device: torch.device
) -> LayerSlots:
    """As vLLM gives memory: one run of bytes per block, with what an earlier request left in them."""
    heads, kv_heads, size = shape
    layout = Layout(policy, heads, kv_heads, size, size, dtype)
    memory = torch.full((count, 1, 1, layout.nbytes), 0x55, dtype=torch.uint8, device=device)
    return layout.carve(memory.view(dtype))


def check(text: str, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """Four requests: pieces of prompts and steps mixed, then steps as a graph holds them, in which the last begins.

    `error` is the largest difference from each text read alone.
    """
    policy, attention, homes = parse_layer_policy(text), Attention(SIZE**-0.5), [5, 2, 7, 3]
    torch.manual_seed(0)
    texts = [
        [torch.randn(160, n, SIZE, device=device, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS)] for _ in homes
    ]
    blocks = blocks_of(policy, (HEADS, KV_HEADS, SIZE), 9, dtype, device)
    read, got = [0, 0, 0, 0], [[] for _ in homes]  # type: list[int], list[list[Tensor]]
    for sizes in ([1, 90, 0, 0], [1, 1, 70, 0], [1, 1, 33, 0], *[[1, 1, 1, 0]] * 10):
        _run(blocks, policy, attention, homes, texts, read, got, sizes)
    _replay(blocks, policy, attention, homes, texts, read, got, steps=20)
    errors = []
    for count, pieces, (query, key, value) in zip(read, got, texts, strict=True):
        alone = empty_slots(policy, *(tensor.transpose(0, 1)[None] for tensor in (key, value)), HEADS)
        new = (tensor[:count].transpose(0, 1)[None] for tensor in (query, key, value))
        want = read_text(alone, *new, policy, attention)[0].transpose(0, 1)
        errors.append(float((torch.cat(pieces) - want).abs().max()))
    held = [int((slots.positions[homes] >= 0).sum(-1).max()) for slots in parts_of(blocks)]
    bounded = all(most <= (part.capacity or 0) for most, part in zip(held, parts(policy), strict=True))
    right = max(errors) < (1e-4 if dtype == torch.float32 else 3e-2) and bounded
    graph = device.type == "cuda"
    row = {
        "kind": "backend",
        "policy": text,
        "dtype": str(dtype),
        "right": right,
        "error": max(errors),
        "held": max(held),
        "read": read,
    }
    print(row | {"graph": graph}, flush=True)
    return row | {"graph": graph}


def _run(
    blocks: LayerSlots,
    policy: LayerPolicy,
    attention: Attention,
    homes: list[int],
    texts: list[list[Tensor]],
    read: list[int],
    got: list[list[Tensor]],
    sizes: list[int],
) -> None:
    """One batch: so many new tokens of each request, those with one first, as vLLM orders them."""
    order = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: sizes[i] > 1)
    device = texts[0][0].device
    starts = [0]
    for i in order:
        starts.append(starts[-1] + sizes[i])
    batch = batch_of(
        torch.tensor([homes[i] for i in order], device=device),
        torch.tensor([read[i] for i in order], device=device),
        starts,
    )
    new = [torch.cat([texts[i][n][read[i] : read[i] + sizes[i]] for i in order]) for n in range(3)]
    output = torch.empty_like(new[0])
    attend(blocks, batch, *new, policy, attention, output)
    for i, start in zip(order, starts, strict=False):
        got[i].append(output[start : start + sizes[i]].clone())
        read[i] += sizes[i]


def _replay(
    blocks: LayerSlots,
    policy: LayerPolicy,
    attention: Attention,
    homes: list[int],
    texts: list[list[Tensor]],
    read: list[int],
    got: list[list[Tensor]],
    steps: int,
) -> None:
    """Single tokens in a batch of fixed shape; its last rows are padding and point at block 0, as vLLM's do.

    On a GPU from a CUDA graph, which knows nothing of the host.
    """
    device, rows = texts[0][0].device, len(homes) + 2
    inputs, starts = StaticInputs(rows + 3, device), list(range(rows + 1))

    def next_batch(counts: list[int]) -> Batch:
        """As the builder makes it of vLLM's tensors, before every batch."""
        table, computed = (torch.tensor([*of, 0, 0], dtype=torch.int32, device=device) for of in (homes, counts))
        return batch_of(*inputs.put(table, computed), starts)

    new = [torch.zeros(rows, n, SIZE, device=device, dtype=texts[0][0].dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
    output = torch.empty_like(new[0])
    batch = next_batch([0] * len(homes))
    assert batch.begins
    assert device.type == "cpu" or not batch.seen_list, "metadata of steps must stay on the device"

    def call() -> None:
        attend(blocks, batch, *new, policy, attention, output)

    memory = [tensor for slots in parts_of(blocks) for tensor in slots.tensors().values()]
    before = [tensor.clone() for tensor in memory]
    replay = _graphed(call) if device.type == "cuda" else call
    for tensor, old in zip(memory, before, strict=True):
        tensor.copy_(old)
    for _ in range(steps):
        for i in range(len(homes)):
            for n in range(3):
                new[n][i] = texts[i][n][read[i]]
        next_batch(read)  # the graph holds the first one
        replay()
        for i in range(len(homes)):
            got[i].append(output[i : i + 1].clone())
            read[i] += 1


def _graphed(call: Callable[[], None]) -> Callable[[], None]:
    from gpu import captured  # Triton's, so on a GPU only

    return captured(call)


def timed(shape: list[int], batch: int, device: torch.device) -> dict[str, object]:
    """A layer's step for so many requests with full slots, and attention to a full cache."""
    heads, kv_heads, size, capacity, context = shape[:5]
    policy, attention = parse_layer_policy(f"tova:{capacity}"), Attention(size**-0.5)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = [blocks_of(policy, (heads, kv_heads, size), batch + 1, dtype, device) for _ in range(LAYERS)]
    for (blocks,) in map(parts_of, layers):
        blocks.keys.normal_()
        blocks.values.normal_()
        blocks.positions.copy_(torch.arange(capacity + 1, device=device).expand_as(blocks.positions))
        blocks.positions[:, :, 3] = -1
        blocks.next.fill_(3)
    new = [torch.randn(batch, n, size, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    index, seen = torch.arange(1, batch + 1, device=device), torch.full((batch,), context, device=device)
    made, output = batch_of(index, seen, list(range(batch + 1))), torch.empty_like(new[0])

    def ours() -> None:
        seen.add_(1)
        for blocks in layers:
            attend(blocks, made, *new, policy, attention, output)

    ours_us = _microseconds(ours, device) / LAYERS
    count = max(2, min(LAYERS, 2**33 // (2 * batch * kv_heads * context * size * dtype.itemsize)))
    full = [torch.randn(2, batch, kv_heads, context, size, device=device, dtype=dtype) for _ in range(count)]

    def plain() -> None:
        for keys, values in full:
            scaled_dot_product_attention(new[0][:, :, None], keys, values, enable_gqa=True)

    row = {
        "kind": "backend step", "policy": str(policy), "batch": batch, "shape": shape[:4], "dtype": str(dtype),
        "us": ours_us, "floor_bytes": 2 * batch * kv_heads * (capacity + 1) * size * dtype.itemsize,
        "full_context": context, "full_us": _microseconds(plain, device) / count,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    print(row, flush=True)
    return row


def _microseconds(call: Callable[[], None], device: torch.device, repeats: int = 7) -> float:
    """The median time of a call; on a GPU as a CUDA graph."""
    call()
    if device.type == "cuda":
        call = _graphed(call)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6


if __name__ == "__main__":
    main()
