"""The Triton step on a GPU: is it right, how near is it to the bytes, what does eviction add to a decoding step?

`PYTHONPATH=src python benchmarks/step_cuda.py check time layers --out results/step.jsonl` (needs torch alone). Every
record holds machine, versions, shapes, the median and the spread (smallest, largest) over 7 repeats of a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch
from cuda import bandwidth, captured, poisoned, record, timed, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from msrnn.core.attention import Attention
from msrnn.core.slots import State
from msrnn.kernels.torch import step as eager_step
from msrnn.kernels.triton import step as gpu_step
from msrnn.policy import Policy, parse

Shape = tuple[int, int, int, int]  # batch, query heads, KV heads, head size


def filled(policy: Policy, shape: Shape, dtype: torch.dtype, window: int | None = None) -> tuple[State, Tensor]:
    """A state that is full, in no order, with scores; and the slots of the next tokens."""
    batch, heads, kv_heads, size = shape
    like = torch.empty(batch, kv_heads, 1, size, dtype=dtype, device="cuda")
    state = State.empty(policy, like, like, heads, window)
    state.keys.normal_()
    state.values.normal_()
    units, slots = state.positions.shape[1:]
    state.seen.fill_(slots)
    order = torch.rand(batch, units, slots, device="cuda").argsort(-1)
    state.positions.copy_(order)  # 0 is the empty one
    slot = order.argmin(-1)
    state.positions.scatter_(2, slot[..., None], -1)
    if state.scores is not None:
        state.scores.uniform_()
    return state, slot


def token(state: State, heads: int, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, _, size = state.keys.shape
    query = spread * torch.randn(batch, heads, size, dtype=state.keys.dtype, device="cuda")
    return query, torch.randn_like(state.keys[:, :, 0]), torch.randn_like(state.values[:, :, 0])


def exact(state: State, slot: Tensor, new: tuple[Tensor, ...], attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """In float64, with the newcomer in place: visible columns [B, U, S], weights [B, H, S], outputs [B, H, D]."""
    query, key, value = (tensor.double() for tensor in new)
    units, stored = slot.shape[1], key.shape[1]
    place = slot.repeat_interleave(stored // units, 1)[..., None, None].expand(-1, -1, 1, key.shape[2])
    keys, values = state.keys.double(), state.values.double()
    keys.scatter_(2, place, key[:, :, None])
    values.scatter_(2, place, value[:, :, None])
    now = state.seen[:, None, None]
    born = state.positions.scatter(2, slot[..., None], now.expand(-1, units, 1))
    visible = born >= 0 if attention.window is None else (born >= 0) & (born > now - attention.window)
    group = query.shape[1] // stored
    logits = (query[:, :, None] @ keys.repeat_interleave(group, 1).mT)[:, :, 0] * attention.scale
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    logits = logits.masked_fill(~visible.repeat_interleave(query.shape[1] // units, 1), -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks.double().view(1, -1, 1).expand(len(query), -1, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : born.shape[2]]
    return born, weights, (weights[:, :, None] @ values.repeat_interleave(group, 1))[:, :, 0]


def referee(text: str, shape: Shape, dtype: torch.dtype, extra: str, tokens: int = 6) -> dict[str, float]:
    """Replay every eviction in float64: the worst regret, and the worst error of outputs beside eager's own."""
    policy = parse(text)
    heads = shape[1]
    attention = Attention(
        shape[3] ** -0.5,
        softcap=5.0 if extra == "softcap" else None,
        window=(policy.capacity or 0) - 7
        if extra == "window"
        else (policy.capacity or 0) + 11
        if extra == "wide"
        else None,
        sinks=torch.randn(heads, device="cuda") if extra == "sinks" else None,
    )
    state, slot = filled(policy, shape, dtype, attention.window)
    worst = {"regret": 0.0, "error": 0.0, "eager_error": 0.0, "scores": 0.0}
    for _ in range(tokens):
        new = token(state, heads)
        if extra == "inactive":
            state.seen[1::2] = -1 - state.seen[1::2].abs()
        active = state.seen >= 0
        born, weights, wanted = exact(state, slot, new, attention)
        before, spot, twin, other = state.fork(), slot.clone(), state.fork(), slot.clone()
        seen = torch.where(active, state.seen, -1)
        with poisoned():
            got = gpu_step.step(
                *new, state.keys, state.values, state.positions, state.scores, slot, seen, policy, attention
            )
        plain = eager_step.step(
            *new, twin.keys, twin.values, twin.positions, twin.scores, other, seen, policy, attention
        )
        judge(worst, state, before, slot, spot, born, weights, active, policy, attention)
        assert got.isfinite().all(), "an output is not finite"
        for name, out in (("error", got), ("eager_error", plain)):
            worst[name] = max(worst[name], float((out.double() - wanted)[active].norm() / wanted[active].norm()))
        written = state.keys.gather(2, rows_at(spot, state.keys)), state.values.gather(2, rows_at(spot, state.values))
        for tensor, had, came in zip(written, (before.keys, before.values), new[1:], strict=True):
            old = had.gather(2, rows_at(spot, had))[:, :, 0]
            assert torch.equal(tensor[:, :, 0], torch.where(active[:, None, None], came, old)), "the newcomer"
        state.seen.copy_(
            torch.where(active, state.seen + 1, -1 - state.seen) if extra == "inactive" else state.seen + 1
        )
    return worst


def rows_at(slot: Tensor, rows: Tensor) -> Tensor:
    share = rows.shape[1] // slot.shape[1]
    return slot.repeat_interleave(share, 1)[..., None, None].expand(-1, -1, 1, rows.shape[3])


def judge(
    worst: dict[str, float], state: State, before: State, slot: Tensor, spot: Tensor, born: Tensor, weights: Tensor,
    active: Tensor, policy: Policy, attention: Attention,
) -> None:  # fmt: skip
    """Who left: exactly those who had to, no protected one, none better than the best choice by more than rounding."""
    batch, units, slots = born.shape
    now, here = before.seen[:, None, None], active[:, None, None]
    assert torch.equal(state.positions[~active], before.positions[~active]), "an inactive row changed"
    assert torch.equal(slot[~active], spot[~active]), "an inactive row's slot changed"
    by_age = torch.zeros_like(born, dtype=torch.bool)
    if attention.window is not None:
        by_age = (born >= 0) & (born + attention.window - 1 <= now)
    staying = (born >= 0) & ~by_age
    left = (born >= 0) & (state.positions < 0) & here
    victim = left & ~by_age
    assert not (by_age & ~left & here).any(), "a token outlived the model's window"
    assert torch.equal(torch.where(left | ~here, 0, state.positions), torch.where(left | ~here, 0, born)), "positions"
    due = (staying.sum(-1) > (policy.capacity or 2**60)) & active[:, None]
    assert torch.equal(victim.sum(-1), due.long()), "not one victim where one is due"
    free = staying & (born >= policy.first) & (born <= now - policy.last)
    assert not (victim & ~free).any(), "a protected token left"
    empty = (state.positions < 0).to(torch.uint8).argmax(-1)
    assert torch.equal(slot[active], empty[active]), "the next slot is not the lowest empty one"
    mean = weights.view(batch, units, -1, slots).mean(2)
    score = mean
    if before.scores is not None and state.scores is not None:
        score = mean + policy.momentum * before.scores.double().scatter(2, spot[..., None], 0)
        held = (born >= 0) & here
        worst["scores"] = max(worst["scores"], float((state.scores.double() - score)[held].abs().max()))
    best = score.masked_fill(~free, torch.inf).amin(-1)
    chosen = score.masked_fill(~victim, -torch.inf).amax(-1)
    if not policy.blind:
        worst["regret"] = max(worst["regret"], float((chosen - best).masked_fill(~due, 0).max()))


def check(shard: int = 0, shards: int = 1) -> None:
    """Random states, all policies, scopes and kinds of attention, poisoned memory."""
    half, single = torch.bfloat16, torch.float32
    shapes: list[tuple[Shape, torch.dtype, int]] = [
        ((1, 32, 32, 128), half, 512), ((3, 32, 8, 128), half, 300), ((48, 8, 8, 64), torch.float16, 129),
        ((2, 8, 2, 256), half, 2048), ((1, 32, 8, 128), half, 8192), ((5, 9, 3, 64), single, 77),
        ((40, 28, 4, 128), half, 200), ((2, 6, 6, 80), single, 33), ((40, 32, 32, 128), half, 130),
        ((150, 8, 8, 256), half, 60), ((40, 32, 32, 64), single, 90),
    ]  # fmt: skip
    policies = ("tova:{k}", "tova+4:{k},last=8", "h2o:{k}", "h2o-layer:{k},momentum=0.9", "tova-head:{k}",
                "tova-query-head:{k}", "window+4:{k}")  # fmt: skip
    extras, index, cases, wrong = ("", "window", "sinks", "wide", "inactive", "softcap"), 0, 0, 0
    for shape, dtype, capacity in shapes:
        for text in policies:
            policy, extra = text.format(k=capacity), extras[index % len(extras)]
            index += 1
            if index % shards != shard:
                continue
            cases += 1
            try:
                found = referee(policy, shape, dtype, extra)
            except AssertionError as error:
                record("WRONG", policy=policy, shape=shape, dtype=str(dtype)[6:], extra=extra, what=str(error))
                wrong += 1
                continue
            loose = 2e-6 if "h2o" in policy else 2e-7
            fine = found["regret"] <= loose and found["error"] <= 2 * found["eager_error"] + 1e-6
            fine = fine and found["scores"] <= 1e-5
            wrong += not fine
            record(
                "checked" if fine else "WRONG", policy=policy, shape=shape, dtype=str(dtype)[6:], extra=extra, **found
            )
    record("check", shard=f"{shard}/{shards}", cases=cases, wrong=wrong)


def graphs() -> None:
    """A captured step, replayed, leaves the state that as many plain calls leave."""
    for text, shape in (("tova:64", (2, 8, 2, 64)), ("h2o:64", (2, 8, 8, 128)), ("tova:512", (1, 32, 32, 128))):
        policy, attention = parse(text), Attention(0.1)
        state, slot = filled(policy, shape, torch.bfloat16)
        new = token(state, shape[1])

        def advance(state: State = state, slot: Tensor = slot, new: Any = new, policy: Policy = policy) -> None:
            held = (state.keys, state.values, state.positions, state.scores, slot, state.seen)
            new[0].copy_(gpu_step.step(*new, *held, policy, attention))  # noqa: B023
            state.seen.add_(1)

        replay = captured(advance)
        start = {name: tensor.clone() for name, tensor in (state.tensors() | {"slot": slot, "query": new[0]}).items()}
        live = state.tensors() | {"slot": slot, "query": new[0]}
        for _ in range(20):
            replay()
        replayed = {name: tensor.clone() for name, tensor in live.items()}
        for name, tensor in start.items():
            live[name].copy_(tensor)
        for _ in range(20):
            advance()
        same = all(torch.equal(replayed[name], tensor) for name, tensor in live.items())
        record("graph", policy=text, shape=shape, replays=20, same=same)


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip


def sdpa(state: State, slot: Tensor, new: tuple[Tensor, ...], scale: float, backend: str) -> Tensor:
    """The newcomer is written over the first row, and all rows are attended to: nothing is scored, nobody leaves."""
    query, key, value = new
    keys, values = state.keys[:, :, :-1], state.values[:, :, :-1]
    keys[:, :, 0], values[:, :, 0] = key, value
    with sdpa_kernel(BACKENDS[backend]):
        grouped = keys.shape[1] != query.shape[1]
        return scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale, enable_gqa=grouped)[:, :, 0]


def stepped(state: State, slot: Tensor, new: tuple[Tensor, ...], policy: Policy, scale: float) -> Tensor:
    held = (state.keys, state.values, state.positions, state.scores, slot, state.seen)
    return gpu_step.step(*new, *held, policy, Attention(scale))


def attentions(policy: str, shape: Shape) -> dict[str, Callable[..., Tensor]]:
    """Ways to attend in a decoding step, by name: with eviction, without scores, and PyTorch's without any."""
    scale, blind = shape[3] ** -0.5, parse(f"window:{parse(policy).capacity}")
    ways: dict[str, Callable[..., Tensor]] = {
        policy: lambda state, slot, new: stepped(state, slot, new, parse(policy), scale),
        str(blind): lambda state, slot, new: stepped(state, slot, new, blind, scale),
    }
    for backend in BACKENDS:
        ways[f"SDPA {backend}"] = lambda *held, backend=backend: sdpa(*held, scale, backend)
    return ways


SHAPES: dict[str, tuple[int, int, int, int]] = {
    "LLaMA-2-7B": (32, 32, 128, 11008),
    "Llama-3-8B": (32, 8, 128, 14336),
}  # fmt: skip


def timing(batches: tuple[int, ...] = (1, 48, 384), sizes: tuple[int, ...] = (512, 2048)) -> None:
    """The attention of one layer alone."""
    speed = bandwidth()
    record("bandwidth", bytes_per_s=speed)
    for name, (heads, kv_heads, size, _) in SHAPES.items():
        for capacity in sizes:
            for batch in batches:
                alone(name, (batch, heads, kv_heads, size), capacity, speed)
                torch.cuda.empty_cache()


def alone(name: str, shape: Shape, capacity: int, speed: float) -> None:
    """Over as many layers as overflow the cache, per layer."""
    held = 4 * shape[0] * shape[2] * capacity * shape[3]
    layers = max(2, min(24, int(200e6 / held)))
    states = [filled(parse(f"tova:{capacity}"), shape, torch.bfloat16) for _ in range(layers)]
    new = token(states[0][0], shape[1])
    for way, call in attentions(f"tova:{capacity}", shape).items():
        conditions = {"model": name, "batch": shape[0], "state": capacity, "way": way, "layers": layers}
        spent = graphed(lambda call=call: [call(*state, new) for state in states], layers, conditions)
        if spent:
            floor = held / speed * 1e6
            record("attention", **conditions, **spent, floor_us=floor, times_floor=spent["us"] / floor)


def graphed(call: Callable[[], object], layers: int, conditions: dict[str, Any]) -> dict[str, float]:
    """Microseconds a layer as a CUDA graph; nothing where the way is refused."""
    try:
        replay = captured(call)
    except RuntimeError as error:
        record("refused", **conditions, why=str(error).splitlines()[0][:80])
        torch.cuda.synchronize()
        return {}
    return {key: us / layers for key, us in timed(replay).items()}


def layers(batches: tuple[int, ...] = (1, 48, 384), capacity: int = 512, count: int = 8) -> None:
    """Whole decoding layers, random weights: what eviction adds to a step."""
    speed = bandwidth()
    for name, (heads, kv_heads, size, inner) in SHAPES.items():
        width = heads * size
        sizes = [(width, (heads + 2 * kv_heads) * size), (width, width), (width, inner), (width, inner), (inner, width)]
        weights = [[torch.randn(s, dtype=torch.bfloat16, device="cuda") * 0.02 for s in sizes] for _ in range(count)]
        for batch in batches:
            whole(name, (batch, heads, kv_heads, size), weights, capacity, speed)
            torch.cuda.empty_cache()


def whole(name: str, shape: Shape, weights: list[list[Tensor]], capacity: int, speed: float) -> None:
    """Every way to attend in the same layers, beside the fastest that evicts nothing."""
    batch, heads, kv_heads, size = shape
    states = [filled(parse(f"tova:{capacity}"), shape, torch.bfloat16) for _ in weights]
    x = torch.randn(batch, heads * size, dtype=torch.bfloat16, device="cuda")
    found, conditions = {}, {"model": name, "batch": batch, "state": capacity, "layers": len(weights)}
    for way, call in attentions(f"tova:{capacity}", shape).items():
        spent = graphed(lambda call=call: decode(x, weights, states, call, shape), len(weights), conditions)
        if spent:
            found[way] = spent
    fastest = min((way for way in found if way.startswith("SDPA")), key=lambda way: found[way]["us"])
    parameters = sum(weight.numel() for weight in weights[0])
    floor = (2 * parameters + 4 * batch * kv_heads * capacity * size) / speed * 1e6
    for way, spent in found.items():
        times = {"times_floor": spent["us"] / floor, "times": spent["us"] / found[fastest]["us"]}
        record("layer", **conditions, way=way, **spent, floor_us=floor, against=fastest, **times)


def decode(x: Tensor, weights: Any, states: Any, call: Callable[..., Tensor], shape: Shape) -> Tensor:
    """A model's layers on one token of every sequence, less its rotations."""
    _, heads, kv_heads, size = shape
    for (qkv, out, gate, up, down), state in zip(weights, states, strict=True):
        new = (rms_norm(x, x.shape[1:]) @ qkv).view(len(x), -1, size).split([heads, kv_heads, kv_heads], 1)
        x = x + call(*state, new).reshape(x.shape) @ out
        y = rms_norm(x, x.shape[1:])
        x = x + (silu(y @ gate) * (y @ up)) @ down
    return x


def sweep() -> None:
    """Other tiles and shares."""
    for kv_heads, batch in ((32, 1), (32, 48), (8, 1), (8, 48)):
        shape, policy = (batch, 32, kv_heads, 128), parse("tova:512")
        states = [filled(policy, shape, torch.bfloat16) for _ in range(24 if batch == 1 else 3)]
        new = token(states[0][0], 32)
        for tile, warps, programs in product((2048, 4096, 8192), (2, 4), (1, 2, 4)):
            gpu_step._GROUPED = gpu_step._FEW = gpu_step._MANY = (tile, warps, programs)
            gpu_step._cut.cache_clear()
            how = {"kv_heads": kv_heads, "batch": batch, "tile": tile, "warps": warps, "programs": programs}
            call = lambda: [stepped(*state, new, policy, 0.1) for state in states]  # noqa: B023, E731
            spent = graphed(call, len(states), how)
            if spent:
                record("sweep", **how, **spent)


def kernels() -> None:
    """How long each kernel takes by itself."""
    for kv_heads, batch in ((32, 1), (32, 48), (32, 384), (8, 1), (8, 48), (8, 384)):
        shape, policy = (batch, 32, kv_heads, 128), parse("tova:512")
        states = [filled(policy, shape, torch.bfloat16) for _ in range(24 if batch == 1 else 3)]
        new = token(states[0][0], 32)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                for state in states:
                    stepped(*state, new, policy, 0.1)
            torch.cuda.synchronize()
        for row in profiled.key_averages():
            if row.key in ("attend", "finish"):
                us = row.device_time_total / row.count
                record("kernel", name=row.key, kv_heads=kv_heads, batch=batch, us=us, count=row.count)


def sanitize() -> None:
    """Small cases under compute-sanitizer, deciding in line and beside."""
    for text, shape in (("tova:40", (2, 8, 2, 64)), ("h2o:70", (2, 4, 4, 80)), ("tova:513", (1, 4, 4, 128))):
        for window in (None, 30):
            policy, attention = parse(text), Attention(0.1, window=window)
            state, slot = filled(policy, shape, torch.bfloat16, window)
            for where in (nullcontext(), gpu_step.Side(slot.device), nullcontext()):
                held = (state.keys, state.values, state.positions, state.scores, slot, state.seen)
                with where:
                    gpu_step.step(*token(state, shape[1]), *held, policy, attention)
                state.seen += 1
    torch.cuda.synchronize()
    record("sanitized")


def main() -> None:
    parts = {"check": check, "graphs": graphs, "time": timing, "layers": layers, "sweep": sweep, "kernels": kernels,
             "sanitize": sanitize}  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=list(parts))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shard", default="0/1", help="which share of the checks to make, e.g. 3/8")
    options = parser.parse_args()
    torch.manual_seed(time.time_ns() % 2**32)
    for part in options.parts:
        start = time.perf_counter()
        parts[part](*map(int, options.shard.split("/"))) if part == "check" else parts[part]()
        print(f"-- {part} took {time.perf_counter() - start:.0f} s", flush=True)
        if options.out:
            write(options.out)


if __name__ == "__main__":
    main()
