"""KV heads with budgets of their own on a GPU: are they right, and as fast as equal heads? About half a minute.

    PYTHONPATH=src python benchmarks/check_heads_cuda.py --out records.jsonl

A step of all heads against every head alone, also in a CUDA graph; heads read together against one after the other; and
the time of a layer of LLaMA-2-7B's shape (32 KV heads of 128, 512 slots on average) with equal and unequal heads.
`TRITON_INTERPRET=1` runs the checks on a CPU, on small shapes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from msrnn import kernels
from msrnn.bench import measure
from msrnn.core import head_groups, heads
from msrnn.core.attention import Attention
from msrnn.core.heads import HeadSlots, LayerSlots, parts_of
from msrnn.core.slots import gain_of
from msrnn.eval.record import append_lines
from msrnn.kernels.triton import step as triton_step
from msrnn.plan import HeadPolicies, LayerPolicy, per_layer
from msrnn.policy import parse_policy

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIZE, LENGTH = (128, 1100) if ON_GPU else (32, 320)
BUDGETS = (4, 700) * 4 if ON_GPU else (4, 40, 9)  # few sizes: each alone has kernels of its own
Token = tuple[Tensor, Tensor, Tensor]
CASES: tuple[tuple[str, int, torch.dtype, dict[str, Any]], ...] = (  # kind, query heads of a KV head, dtype, attention
    ("fade", 1, torch.bfloat16, {}),
    ("fade", 4, torch.bfloat16, {}),
    ("h2o,gain=value_norm", 4, torch.float16, {}),
    ("tova-head", 1, torch.float32, {"window": 1000, "sinks": True}),
    ("fade,kv=int8", 1, torch.bfloat16, {}),
    ("tova-head,kv=k8v4", 4, torch.bfloat16, {}),
)
READS = (("fade", 1), ("tova-head", 4), ("fade,kv=int8", 4))
TIMES = (("", 1), ("", 48), ("", 256), (",kv=int8", 1), (",kv=int8", 256), (",kv=k8v4", 256))
SPREAD = [round(512 * (0.4 + 1.2 * head / 31)) for head in range(32)]
STEEP = [292] * 28 + [2052] * 4  # half of all slots are those of four heads


def layer(policy: LayerPolicy, batch: int, share: int, dtype: torch.dtype, seen: int) -> LayerSlots:
    """Slots that are full of random tokens."""
    stored = len(policy.heads) if isinstance(policy, HeadPolicies) else 32
    key = torch.zeros(batch, stored, 1, SIZE, dtype=dtype, device=DEVICE)
    slots = heads.empty_slots(policy, key, key, stored * share)
    count = torch.full((batch,), seen, device=DEVICE)
    for part in parts_of(slots):
        held = min(part.positions.shape[2] - 1, seen)
        for rows in (part.keys, part.values):
            rows.normal_() if rows.is_floating_point() else rows.random_(0 if rows.dtype == torch.uint8 else -127, 127)
        if part.scales is not None:
            part.scales.fill_(2**-6)
        if part.scores is not None:
            part.scores.uniform_()
        if part.gains is not None:
            part.gains.copy_(gain_of(part.decoded(part.gains.dtype)[1], part.gains.dtype))
        part.positions[:, :, :held] = torch.arange(seen - held, seen, device=DEVICE)
        part.next.fill_(held)
        part.seen, part.fed = count, seen
    return slots


def token(batch: int, stored: int, share: int, dtype: torch.dtype) -> Token:
    sizes = (stored * share, stored, stored)
    query, key, value = (torch.randn(batch, n, SIZE, device=DEVICE).to(dtype) for n in sizes)
    return query, key, value


def alone(slots: HeadSlots, new: Token, policy: HeadPolicies, attention: Attention) -> Tensor:
    """Every head by itself."""
    outputs = []
    for one, part in zip(slots.heads, heads.layer_parts(policy), strict=True):
        own = [part.take(rows) for rows in new]
        outputs.append(triton_step.step(one, *own, part.policy, part.attention(attention)))
    return torch.cat(outputs, 1)


def together(slots: HeadSlots, new: Token, policy: HeadPolicies, attention: Attention) -> Tensor:
    output = triton_step.step_heads(slots.heads, *new, policy.heads, attention, slots.tables)
    assert output is not None, "these heads are left to a step each"
    return output


def start(case: tuple[str, int, torch.dtype, dict[str, Any]]) -> tuple[HeadPolicies, Attention, HeadSlots, Token]:
    kind, share, dtype, extra = case
    policy = per_layer(kind, [BUDGETS])[0]
    sinks = torch.randn(len(BUDGETS) * share, device=DEVICE) if extra.get("sinks") else None
    attention = Attention(SIZE**-0.5, None, extra.get("window"), sinks)
    slots = layer(policy, 3, share, dtype, 1000)
    assert isinstance(policy, HeadPolicies)
    assert isinstance(slots, HeadSlots)
    return policy, attention, slots, token(3, len(BUDGETS), share, dtype)


def check_steps(case: tuple[str, int, torch.dtype, dict[str, Any]], steps: int) -> dict[str, Any]:
    """From the same slots each time: how far outputs are off, relative to their size, and how many victims differ."""
    policy, attention, slots, new = start(case)
    off, differ, total = 0.0, 0, 0
    for _ in range(steps):
        twin = slots.fork()
        new = token(3, len(BUDGETS), case[1], case[2])
        output, expected = together(slots, new, policy, attention), alone(twin, new, policy, attention)
        off = max(off, float((output - expected).float().norm() / expected.float().norm()))
        for ours, theirs in zip(slots.heads, twin.heads, strict=True):
            differ += int((ours.next != theirs.next).sum())
            total += ours.next.numel()
        slots.seen.add_(1)  # one tensor, which all heads share
    bound = 1e-5 if case[2] == torch.float32 else 1e-2
    return {
        "check": "step",
        "off": off,
        "victims": total,
        "differ": differ,
        "good": off < bound and differ <= total / 200,
    }


def check_graph(case: tuple[str, int, torch.dtype, dict[str, Any]], aside: bool) -> dict[str, Any]:
    """A captured step, replayed, leaves the bits that as many calls leave."""
    policy, attention, slots, new = start(case)

    def advance() -> None:
        with stream:
            new[0].copy_(together(slots, new, policy, attention))
        slots.seen.add_(1)

    stream: AbstractContextManager[object] = kernels.decision_stream(DEVICE) if aside else nullcontext()
    replay = captured(advance)
    live = [*new, *(tensor for one in slots.heads for tensor in one.tensors().values())]
    before = [tensor.clone() for tensor in live]
    for _ in range(20):
        replay()
    replayed = [tensor.clone() for tensor in live]
    for tensor, old in zip(live, before, strict=True):
        tensor.copy_(old)
    for _ in range(20):
        advance()
    same = all(torch.equal(one, two) for one, two in zip(live, replayed, strict=True))
    return {"check": "graph", "aside": aside, "good": same}


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a graph; it has run three times then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay(_keep: object = call) -> None:  # the graph knows only addresses of what the call holds
        graph.replay()

    return replay


def check_read(kind: str, share: int) -> dict[str, Any]:
    """Heads read together on streams, also in a graph, against one after the other: outputs, and tokens that stay.

    In float64, where no survivor depends on how sums are rounded.
    """
    policy, attention = per_layer(kind, [BUDGETS])[0], Attention(SIZE**-0.5)
    sizes = (len(BUDGETS) * share, len(BUDGETS), len(BUDGETS))
    tokens = [torch.randn(2, n, LENGTH, SIZE, device=DEVICE, dtype=torch.float64) for n in sizes]
    first, last = (
        [t[:, :, part].contiguous() for t in tokens] for part in (slice(0, LENGTH - 256), slice(LENGTH - 256, LENGTH))
    )
    layers, outputs = [], []
    for side_by_side in (True, False):
        with patched(head_groups, "_together", lambda _, value=side_by_side: value):
            slots = heads.empty_slots(policy, tokens[1], tokens[2], sizes[0])
            output = heads.read(slots, first[0], first[1], first[2], policy, attention, chunk=256)
            finish = in_graph if side_by_side else heads.read
            outputs.append(torch.cat([output, finish(slots, *last, policy, attention, chunk=256)], 2))
        layers.append(slots)
    off = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
    pairs = zip(*(parts_of(slots) for slots in layers), strict=True)
    stay = [torch.equal(one.positions.sort()[0], two.positions.sort()[0]) for one, two in pairs]
    return {"check": "read", "off": off, "heads": len(stay), "same": sum(stay), "good": off < 1e-6 and all(stay)}


def in_graph(
    slots: LayerSlots, query: Tensor, key: Tensor, value: Tensor, policy: LayerPolicy, attention: Attention, chunk: int
) -> Tensor:
    """A read whose graph is replayed once, from the slots as they were; without a GPU it is a read."""
    before, outputs = slots.fork(), list[Tensor]()

    def run() -> None:
        for one, old in zip(parts_of(slots), parts_of(before), strict=True):
            for name, rows in one.tensors().items():
                rows.copy_(getattr(old, name))
            one.fed, one.packed_at = old.fed, old.packed_at
        outputs[:] = [heads.read(slots, query, key, value, policy, attention, chunk=chunk)]

    replay = captured(run) if ON_GPU else run
    replay()
    return outputs[0].clone()


class patched:
    """An attribute of a module has another value in this context."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self.module, self.name, self.value, self.before = module, name, value, getattr(module, name)

    def __enter__(self) -> None:
        setattr(self.module, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.before)


def policies(kv: str) -> dict[str, LayerPolicy]:
    kind = f"fade{kv}"
    unequal = {name: per_layer(kind, [sizes])[0] for name, sizes in (("0.4 to 1.6", SPREAD), ("4 long heads", STEEP))}
    return {"equal": parse_policy(f"fade:512{kv}")} | unequal


def limits(name: str, batch: int) -> tuple[int, ...]:
    """By how much a head may be longer than the mean, before its slots are split, where there are many."""
    return (2, 1) if name == "0.4 to 1.6" and batch > 1 else (2,)


def advance_of(policy: LayerPolicy, batch: int, one_by_one: bool = False) -> Callable[[], None]:
    """A step of so many layers that they do not fit in the cache of the GPU."""
    layers = [layer(policy, batch, 1, torch.bfloat16, 4096) for _ in range(12 if batch == 1 else 1)]
    new, attention = token(batch, 32, 1, torch.bfloat16), Attention(SIZE**-0.5)
    stream = kernels.decision_stream(DEVICE)

    def advance() -> None:
        with stream:
            for slots in layers:
                if one_by_one and isinstance(slots, HeadSlots) and isinstance(policy, HeadPolicies):
                    alone(slots, new, policy, attention)
                else:
                    heads.step(slots, *new, policy, attention)

    return advance


def time_steps(kv: str, batch: int) -> dict[str, Any]:
    """Microseconds of a layer's step, by how its slots are distributed."""
    times, layers = {}, 12 if batch == 1 else 1
    for name, policy in policies(kv).items():
        for longest in limits(name, batch):
            with patched(triton_step, "_LONGEST", longest):
                triton_step._cut.cache_clear()
                replay = captured(advance_of(policy, batch))
            times[name if longest == 2 else f"{name}, split"] = 1e6 * median(seconds(replay)) / layers
            triton_step._cut.cache_clear()
    if batch == 1 and not kv:
        replay = captured(advance_of(policies(kv)["4 long heads"], batch, one_by_one=True))
        times["4 long heads, one by one"] = 1e6 * median(seconds(replay)) / layers
    measure.clear(DEVICE)
    return {"check": "step time", "kv": kv[4:] or "bfloat16", "batch": batch, "us": times}


def read_anew(empty: LayerSlots, new: list[Tensor], policy: LayerPolicy) -> None:
    heads.read(empty.fork(), new[0], new[1], new[2], policy, Attention(SIZE**-0.5), chunk=256)


def time_reads(length: int = 2048) -> dict[str, Any]:
    """Milliseconds of a layer's read of a prompt, launched kernel by kernel."""
    new = [torch.randn(1, 32, length, SIZE, device=DEVICE).bfloat16() for _ in range(3)]
    times = {}
    for name, policy in policies("").items():
        for side_by_side in (True, False) if name == "0.4 to 1.6" else (True,):
            with patched(head_groups, "_together", lambda _, value=side_by_side: value):
                empty = heads.empty_slots(policy, new[1], new[2], 32)
                call = partial(read_anew, empty, new, policy)
                times[name if side_by_side else f"{name}, one by one"] = 1e3 * median(seconds(call, runs=3, least=0.05))
    return {"check": "read time", "length": length, "ms": times}


def seconds(call: Callable[[], object], runs: int = 5, least: float = 0.03) -> list[float]:
    return measure.seconds(call, DEVICE, runs, least)


def compile_all(part: str) -> None:
    """On threads, before anything is checked or timed; one after the other would take minutes."""
    from msrnn.kernels.triton.compilation import compiling_only

    with compiling_only():
        for case in CASES if part == "checks" else ():
            policy, attention, slots, new = start(case)
            together(slots, new, policy, attention)
            alone(slots, new, policy, attention)
        compile_reads(part)
        if part == "checks":
            return
        for kv, batch in TIMES:
            for name, own in policies(kv).items():
                for longest in limits(name, batch):
                    with patched(triton_step, "_LONGEST", longest):
                        triton_step._cut.cache_clear()
                        advance_of(own, batch)()
                    measure.clear(DEVICE)
        advance_of(policies("")["4 long heads"], 1, one_by_one=True)()
    triton_step._cut.cache_clear()


def compile_reads(part: str) -> None:
    for side_by_side in (True, False):
        with patched(head_groups, "_together", lambda _, value=side_by_side: value):
            for kind, share in READS if part == "checks" else ():
                policy, sizes = per_layer(kind, [BUDGETS])[0], (len(BUDGETS) * share, len(BUDGETS), len(BUDGETS))
                new = [torch.randn(2, n, LENGTH, SIZE, device=DEVICE, dtype=torch.float64) for n in sizes]
                read_anew(heads.empty_slots(policy, new[1], new[2], sizes[0]), new, policy)
            for name, own in policies("").items() if part == "times" else ():
                new = [torch.randn(1, 32, 1100, SIZE, device=DEVICE).bfloat16() for _ in range(3)]
                if side_by_side or name == "0.4 to 1.6":
                    read_anew(heads.empty_slots(own, new[1], new[2], 32), new, own)


def words(values: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            first = next(iter(value.values()))
            return "; ".join(f"{name} {number:.1f} ({number / first:.2f})" for name, number in value.items())
        return f"{value:.1e}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name} {text(value)}" for name, value in values.items())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["checks", "times"], choices=["checks", "times"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shared, good = measure.conditions(DEVICE), True

    def record(row: dict[str, Any]) -> None:
        nonlocal good
        good = good and row.get("good", True)
        print(words(row), flush=True)
        if arguments.out:
            append_lines(arguments.out, [{"kind": "heads", **row} | shared])

    for part in arguments.parts:
        if ON_GPU:
            compile_all(part)
        for row in checks() if part == "checks" else times():
            record(row)
    sys.exit(0 if good else "something differs: see above")


def checks() -> Iterator[dict[str, Any]]:
    for case in CASES:
        about = {"policy": case[0], "share": case[1], "dtype": str(case[2])[6:]}
        yield check_steps(case, 40 if ON_GPU else 1) | about
        for aside in (False, True) if ON_GPU else ():
            yield check_graph(case, aside) | about
    for kind, share in READS:
        yield check_read(kind, share) | {"policy": kind, "share": share, "dtype": "float64"}


def times() -> Iterator[dict[str, Any]]:
    if ON_GPU:
        for kv, batch in TIMES:
            yield time_steps(kv, batch)
        yield time_reads()


if __name__ == "__main__":
    main()
