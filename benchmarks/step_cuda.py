"""The Triton step on a GPU: is it exact, how near is it to the bandwidth, what does eviction add to a decoding step?

`PYTHONPATH=src python benchmarks/step_cuda.py check time layers --out results/step.jsonl` (needs torch alone). Every
record holds machine, versions, shapes, the median and the spread (smallest, largest) over 7 repeats of a CUDA graph.
Without a GPU: `TRITON_INTERPRET=1 python benchmarks/step_cuda.py check graphs sanitize`, on small shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from gpu import DEVICE, ON_GPU, bandwidth, captured, poisoned, record, run_parts, synchronize, timed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from msrnn.core import formats
from msrnn.core.attention import Attention
from msrnn.core.slots import Slots, gain_of
from msrnn.kernels.torch import step as torch_step
from msrnn.kernels.triton import step as triton_step
from msrnn.kernels.triton.notes import DecisionStream
from msrnn.policy import Policy, parse_policy

Shape = tuple[int, int, int, int]  # batch, query heads, KV heads, head size
Token = tuple[Tensor, Tensor, Tensor]  # query [B, H, D], key and value [B, G, D]


def filled(policy: Policy, shape: Shape, dtype: torch.dtype, window: int | None = None) -> Slots:
    """Slots that are full, in no order, with random scores."""
    batch, heads, kv_heads, size = shape
    like = torch.empty(batch, kv_heads, 1, size, dtype=dtype, device=DEVICE)
    slots = Slots.empty(policy, like, like, heads, window)
    numbers = (torch.randn(*slots.keys.shape[:3], size, dtype=dtype, device=DEVICE) for _ in "kv")
    for rows, new in zip(slots.stored, stored(slots, *numbers), strict=True):
        rows.copy_(new)
    units, count = slots.positions.shape[1:]
    slots.seen.fill_(count)
    order = torch.rand(batch, units, count, device=DEVICE).argsort(-1)
    slots.positions.copy_(order)
    slots.next.copy_(order.argmin(-1))  # where 0 was is empty
    slots.positions.scatter_(2, slots.next[..., None], -1)
    if slots.scores is not None:
        slots.scores.uniform_()
    if slots.gains is not None:
        slots.gains.copy_(gain_of(slots.decoded(torch.float32)[1], slots.gains.dtype))
    return slots


def stored(slots: Slots, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """key [..., D] and value [..., V] as slots hold them: themselves, or the definition's codes and scales.

    On the CPU: on a GPU PyTorch divides by a constant through its reciprocal, which is off by a rounding now and then.
    """
    if slots.kv is None:
        return key, value
    return tuple(rows.to(DEVICE) for rows in formats.encode(key.cpu(), value.cpu(), slots.kv))


def decoded(slots: Slots, rows: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """What is stored, in float64."""
    if slots.kv is None:
        return rows[0].double(), rows[1].double()
    return formats.decode(rows[0], rows[1], rows[2], slots.kv, torch.float64)


def random_token(slots: Slots, heads: int, dtype: torch.dtype = torch.bfloat16, spread: float = 2.0) -> Token:
    (batch, count), (size, width) = slots.keys.shape[:2], slots.sizes
    shapes = ((batch, heads, size), (batch, count, size), (batch, count, width))
    query, key, value = (torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes)
    return spread * query, key, value


def in_float64(slots: Slots, token: Token, attention: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """With the new token in its slot: positions [B, U, S], weights times gains [B, H, S], outputs [B, H, D]."""
    query, (key, value) = token[0].double(), decoded(slots, stored(slots, *token[1:]))
    units, kept = slots.next.shape[1], key.shape[1]
    keys, values = (rows.clone() for rows in decoded(slots, slots.stored))
    keys.scatter_(2, slot_index(slots.next, keys), key[:, :, None])
    values.scatter_(2, slot_index(slots.next, values), value[:, :, None])
    now = slots.seen[:, None, None]
    positions = slots.positions.scatter(2, slots.next[..., None], now.expand(-1, units, 1))
    visible = positions >= 0
    if attention.window is not None:
        visible &= positions > now - attention.window
    group = query.shape[1] // kept
    logits = (query[:, :, None] @ keys.repeat_interleave(group, 1).mT)[:, :, 0] * attention.scale
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    logits = logits.masked_fill(~visible.repeat_interleave(query.shape[1] // units, 1), -torch.inf)
    if attention.sinks is not None:
        sinks = attention.sinks.double().view(1, -1, 1).expand(len(query), -1, 1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : positions.shape[2]]
    gained = weights if slots.gains is None else weights * values.norm(dim=-1).repeat_interleave(group, 1)
    return positions, gained, (weights[:, :, None] @ values.repeat_interleave(group, 1))[:, :, 0]


def slot_index(slot: Tensor, rows: Tensor) -> Tensor:
    """slot [B, U], rows [B, G, S, D] -> [B, G, 1, D], to gather or scatter that slot of every stored head."""
    share = rows.shape[1] // slot.shape[1]
    return slot.repeat_interleave(share, 1)[..., None, None].expand(-1, -1, 1, rows.shape[3])


def referee(text: str, shape: Shape, dtype: torch.dtype, extra: str, tokens: int = 6) -> dict[str, float]:
    """Replay every eviction in float64: the worst regret, and the worst output error next to plain PyTorch's own."""
    policy, heads = parse_policy(text), shape[1]
    capacity = policy.capacity or 0
    attention = Attention(
        shape[3] ** -0.5,
        softcap=5.0 if extra == "softcap" else None,
        window={"window": capacity - 7, "wide": capacity + 11}.get(extra),
        sinks=torch.randn(heads, device=DEVICE) if extra == "sinks" else None,
    )
    slots = filled(policy, shape, dtype, attention.window)
    worst = {"regret": 0.0, "error": 0.0, "eager_error": 0.0, "scores": 0.0, "gains": 0.0}
    for _ in range(tokens):
        token, position = random_token(slots, heads, dtype), slots.seen.clone()
        active = torch.ones_like(position, dtype=torch.bool)
        if extra == "inactive":
            active[1::2] = False
        slots.seen.copy_(torch.where(active, position, -1))
        before, twin = slots.fork(), slots.fork()
        positions, gained, expected = in_float64(before, token, attention)
        with poisoned():
            output = triton_step.step(slots, *token, policy, attention)
        plain = torch_step.step(twin, *token, policy, attention)
        judge(worst, slots, before, positions, gained, active, policy, attention)
        assert output.isfinite().all(), "an output is not finite"
        for name, result in (("error", output), ("eager_error", plain)):
            off = (result.double() - expected)[active].norm() / expected[active].norm()
            worst[name] = max(worst[name], float(off))
        check_written(worst, slots, before, token, active)
        slots.seen.copy_(position + active.long())
    return worst


def check_written(worst: dict[str, float], slots: Slots, before: Slots, token: Token, active: Tensor) -> None:
    """Key and value of the new token, and nothing else, have changed in the rows that are active; its gain, too."""
    here, rows = active[:, None, None], stored(slots, *token[1:])
    for after, old, new in zip(slots.stored, before.stored, rows, strict=True):
        new = torch.where(here, new, old.gather(2, slot_index(before.next, old))[:, :, 0])
        assert torch.equal(after, old.scatter(2, slot_index(before.next, old), new[:, :, None])), "the new token"
    if slots.gains is not None and before.gains is not None:
        index = slot_index(before.next, before.gains[..., None])[..., 0]
        norm = gain_of(decoded(slots, rows)[1], torch.float64).to(before.gains.dtype)
        norm = torch.where(active[:, None], norm, before.gains.gather(2, index)[..., 0])
        off = (slots.gains - before.gains.scatter(2, index, norm[..., None])).abs() / norm.max()
        worst["gains"] = max(worst["gains"], float(off.nan_to_num(torch.inf).max()))


def judge(
    worst: dict[str, float], slots: Slots, before: Slots, positions: Tensor, gained: Tensor, active: Tensor,
    policy: Policy, attention: Attention,
) -> None:  # fmt: skip
    """Exactly those leave who must, no protected one, and no victim is worse than the best by more than rounding.

    positions [B, U, S] have the new token in its slot; gained [B, H, S] are attention weights times gains.
    """
    batch, units, count = positions.shape
    now, here = before.seen[:, None, None], active[:, None, None]
    assert torch.equal(slots.positions[~active], before.positions[~active]), "an inactive row changed"
    assert torch.equal(slots.next[~active], before.next[~active]), "an inactive row's next slot changed"
    by_age = torch.zeros_like(positions, dtype=torch.bool)
    if attention.window is not None:
        by_age = (positions >= 0) & (positions + attention.window - 1 <= now)
    staying = (positions >= 0) & ~by_age
    left = (positions >= 0) & (slots.positions < 0) & here
    victim = left & ~by_age
    assert not (by_age & ~left & here).any(), "a token outlived the model's window"
    unchanged = ~left & here
    assert torch.equal(slots.positions[unchanged], positions[unchanged]), "positions"
    due = (staying.sum(-1) > (policy.capacity or 2**60)) & active[:, None]
    assert torch.equal(victim.sum(-1), due.long()), "not one victim where one is due"
    free = staying & (positions >= policy.first) & (positions <= now - policy.last)
    assert not (victim & ~free).any(), "a protected token left"
    empty = (slots.positions < 0).to(torch.uint8).argmax(-1)
    assert torch.equal(slots.next[active], empty[active]), "the next slot is not the lowest empty one"
    score = gained.view(batch, units, -1, count).mean(2)
    if before.scores is not None and slots.scores is not None:
        score = score + policy.momentum * before.scores.double().scatter(2, before.next[..., None], 0)
        held = (positions >= 0) & here
        worst["scores"] = max(worst["scores"], float((slots.scores.double() - score)[held].abs().max()))
    lowest = score.masked_fill(~free, torch.inf).amin(-1)
    chosen = score.masked_fill(~victim, -torch.inf).amax(-1)
    if not policy.blind:
        worst["regret"] = max(worst["regret"], float((chosen - lowest).masked_fill(~due, 0).max()))


SHAPES: list[tuple[Shape, torch.dtype, int]] = [  # with dtype and capacity
    ((1, 32, 32, 128), torch.bfloat16, 512), ((3, 32, 8, 128), torch.bfloat16, 300),
    ((48, 8, 8, 64), torch.float16, 129), ((2, 8, 2, 256), torch.bfloat16, 2048),
    ((1, 32, 8, 128), torch.bfloat16, 8192), ((5, 9, 3, 64), torch.float32, 77),
    ((40, 28, 4, 128), torch.bfloat16, 200), ((2, 6, 6, 80), torch.float32, 33),
    ((40, 32, 32, 128), torch.bfloat16, 130), ((150, 8, 8, 256), torch.bfloat16, 60),
    ((40, 32, 32, 64), torch.float32, 90),
] if ON_GPU else [((2, 4, 2, 16), torch.float32, 20), ((3, 2, 2, 20), torch.float32, 17)]  # fmt: skip
POLICIES = ("tova:{k}", "tova+4:{k},last=8", "h2o:{k}", "h2o-layer:{k},momentum=0.9", "tova-head:{k}",
            "tova-query-head:{k}", "window+4:{k}", "tova:{k},gain=value_norm", "h2o:{k},gain=value_norm",
            "tova-query-head:{k},gain=value_norm", "tova:{k},kv=int8", "h2o:{k},kv=k8v4",
            "tova:{k},gain=value_norm,kv=k8v4", "tova-query-head:{k},kv=int8")  # fmt: skip
EXTRAS = ("", "window", "sinks", "wide", "inactive", "softcap")


def check(shard: int = 0, shards: int = 1) -> None:
    """Random slots, all policies, scopes and kinds of attention, NaN-filled memory."""
    cases = [(i + j, *shape, text) for i, shape in enumerate(SHAPES) for j, text in enumerate(POLICIES)]
    checked, wrong = 0, 0
    for index, (turn, shape, dtype, capacity, text) in enumerate(cases):
        if index % shards == shard:
            checked += 1
            wrong += not passes(text.format(k=capacity), shape, dtype, EXTRAS[turn % len(EXTRAS)])
    record("check", shard=f"{shard}/{shards}", cases=checked, wrong=wrong)


def passes(policy: str, shape: Shape, dtype: torch.dtype, extra: str) -> bool:
    """One case against the referee, recorded."""
    case = {"policy": policy, "shape": shape, "dtype": str(dtype)[6:], "extra": extra}
    try:
        worst = referee(policy, shape, dtype, extra)
    except AssertionError as error:
        record("WRONG", **case, what=str(error))
        return False
    gain = 2 * shape[3] ** 0.5 if "gain" in policy else 1.0  # the norm of normal values: scores are that much larger
    fine = worst["regret"] <= (2e-6 if "h2o" in policy else 2e-7) * gain and worst["scores"] <= 1e-5 * gain
    fine = fine and worst["error"] <= 2 * worst["eager_error"] + 1e-6 and worst["gains"] <= 1e-6
    record("checked" if fine else "WRONG", **case, **worst)
    return fine


def graphs() -> None:
    """A captured step, replayed, leaves the slots that as many plain calls leave."""
    for text, shape in (
        ("tova:64", (2, 8, 2, 64)), ("h2o:64", (2, 8, 8, 128)), ("tova:512", (1, 32, 32, 128)),
        ("h2o:64,gain=value_norm", (2, 8, 8, 128)), ("tova:64,kv=int8", (2, 8, 2, 64)),
        ("h2o:64,kv=k8v4", (2, 8, 8, 128)), ("tova:512,kv=k8v4", (1, 32, 32, 128)),
    )[slice(None if ON_GPU else 1)]:  # fmt: skip
        policy, attention = parse_policy(text), Attention(0.1)
        slots = filled(policy, shape, torch.bfloat16)
        token = random_token(slots, shape[1])

        def advance(slots: Slots = slots, token: Token = token, policy: Policy = policy) -> None:
            token[0].copy_(triton_step.step(slots, *token, policy, attention))  # noqa: B023
            slots.seen.add_(1)

        replay = captured(advance)
        live = slots.tensors() | {"query": token[0]}
        start = {name: tensor.clone() for name, tensor in live.items()}
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
Attend = Callable[[Slots, Token], Tensor]


def sdpa(slots: Slots, token: Token, scale: float, backend: str) -> Tensor:
    """The new token overwrites the first slot, and all slots are attended to: no scores, no eviction."""
    query, key, value = token
    keys, values = slots.keys[:, :, :-1], slots.values[:, :, :-1]
    keys[:, :, 0], values[:, :, 0] = key, value
    with sdpa_kernel(BACKENDS[backend]):
        grouped = keys.shape[1] != query.shape[1]
        return scaled_dot_product_attention(query[:, :, None], keys, values, scale=scale, enable_gqa=grouped)[:, :, 0]


def step(slots: Slots, token: Token, policy: Policy, scale: float) -> Tensor:
    """Slots without gains may be stepped with any policy that needs none, so that all ways share one memory."""
    bare = slots if policy.gain is not None else replace(slots, gains=None)
    return triton_step.step(bare, *token, policy, Attention(scale))


def attentions(capacity: int, scale: float) -> dict[str, Attend]:
    """Ways to attend in a decoding step, by name: with eviction, without scores, and PyTorch's without either."""
    texts = (f"tova:{capacity}", f"tova:{capacity},gain=value_norm", f"window:{capacity}")
    policies = {text: parse_policy(text) for text in texts}
    ways: dict[str, Attend] = {
        text: lambda slots, token, policy=policy: step(slots, token, policy, scale)  # type: ignore[misc]
        for text, policy in policies.items()
    }
    for backend in BACKENDS:
        ways[f"SDPA {backend}"] = lambda slots, token, backend=backend: sdpa(slots, token, scale, backend)  # type: ignore[misc]
    return ways


MODELS: dict[str, tuple[int, int, int, int]] = {  # query heads, KV heads, head size, MLP size
    "LLaMA-2-7B": (32, 32, 128, 11008),
    "Llama-3-8B": (32, 8, 128, 14336),
}


def timing(batches: tuple[int, ...] = (1, 48, 384), capacities: tuple[int, ...] = (512, 2048)) -> None:
    """The attention of one layer alone."""
    speed = bandwidth()
    record("bandwidth", bytes_per_s=speed)
    for name, (heads, kv_heads, size, _) in MODELS.items():
        for capacity in capacities:
            for batch in batches:
                time_attention(name, (batch, heads, kv_heads, size), capacity, speed)
                torch.cuda.empty_cache()


def time_attention(name: str, shape: Shape, capacity: int, speed: float) -> None:
    """Per layer, over enough layers to overflow the L2 cache."""
    kv_bytes = 4 * shape[0] * shape[2] * capacity * shape[3]
    layers = max(2, min(24, int(200e6 / kv_bytes)))
    states = [filled(parse_policy(f"tova:{capacity},gain=value_norm"), shape, torch.bfloat16) for _ in range(layers)]
    token = random_token(states[0], shape[1])
    for way, attend in attentions(capacity, shape[3] ** -0.5).items():
        conditions = {"model": name, "batch": shape[0], "state": capacity, "way": way, "layers": layers}
        times = graphed(lambda attend=attend: [attend(slots, token) for slots in states], layers, conditions)
        if times:
            floor = kv_bytes / speed * 1e6
            record("attention", **conditions, **times, floor_us=floor, times_floor=times["us"] / floor)


def graphed(call: Callable[[], object], layers: int, conditions: dict[str, Any]) -> dict[str, float]:
    """Microseconds per layer as a CUDA graph; nothing where PyTorch refuses the call."""
    try:
        replay = captured(call)
    except RuntimeError as error:
        record("refused", **conditions, why=str(error).splitlines()[0][:80])
        synchronize()
        return {}
    return {key: us / layers for key, us in timed(replay).items()}


def layers(batches: tuple[int, ...] = (1, 48, 384), capacity: int = 512, count: int = 8) -> None:
    """Whole decoder layers, random weights: what eviction adds to a step."""
    speed = bandwidth()
    for name, (heads, kv_heads, size, inner) in MODELS.items():
        width = heads * size
        sizes = [(width, (heads + 2 * kv_heads) * size), (width, width), (width, inner), (width, inner), (inner, width)]
        weights = [[torch.randn(s, dtype=torch.bfloat16, device=DEVICE) * 0.02 for s in sizes] for _ in range(count)]
        for batch in batches:
            time_layers(name, (batch, heads, kv_heads, size), weights, capacity, speed)
            torch.cuda.empty_cache()


def time_layers(name: str, shape: Shape, weights: list[list[Tensor]], capacity: int, speed: float) -> None:
    """Every way to attend in the same layers, relative to the fastest that evicts nothing."""
    batch, heads, kv_heads, size = shape
    states = [filled(parse_policy(f"tova:{capacity},gain=value_norm"), shape, torch.bfloat16) for _ in weights]
    x = torch.randn(batch, heads * size, dtype=torch.bfloat16, device=DEVICE)
    times, conditions = {}, {"model": name, "batch": batch, "state": capacity, "layers": len(weights)}
    for way, attend in attentions(capacity, size**-0.5).items():
        spent = graphed(lambda attend=attend: decode(x, weights, states, attend, shape), len(weights), conditions)
        if spent:
            times[way] = spent
    fastest = min((way for way in times if way.startswith("SDPA")), key=lambda way: times[way]["us"])
    parameters = sum(weight.numel() for weight in weights[0])
    floor = (2 * parameters + 4 * batch * kv_heads * capacity * size) / speed * 1e6
    for way, spent in times.items():
        ratios = {"times_floor": spent["us"] / floor, "times": spent["us"] / times[fastest]["us"]}
        record("layer", **conditions, way=way, **spent, floor_us=floor, against=fastest, **ratios)


def decode(x: Tensor, weights: list[list[Tensor]], states: list[Slots], attend: Attend, shape: Shape) -> Tensor:
    """A model's layers on one token of every sequence, without RoPE."""
    _, heads, kv_heads, size = shape
    for (qkv, out, gate, up, down), slots in zip(weights, states, strict=True):
        token = (rms_norm(x, x.shape[1:]) @ qkv).view(len(x), -1, size).split([heads, kv_heads, kv_heads], 1)
        x = x + attend(slots, token).reshape(x.shape) @ out
        y = rms_norm(x, x.shape[1:])
        x = x + (silu(y @ gate) * (y @ up)) @ down
    return x


def sweep() -> None:
    """Other tiles and splits."""
    for kv_heads, batch in ((32, 1), (32, 48), (8, 1), (8, 48)):
        shape, policy = (batch, 32, kv_heads, 128), parse_policy("tova:512")
        states = [filled(policy, shape, torch.bfloat16) for _ in range(24 if batch == 1 else 3)]
        token = random_token(states[0], 32)
        for tile, warps, programs in product((2048, 4096, 8192), (2, 4), (1, 2, 4)):
            triton_step._GROUPED = triton_step._FEW = triton_step._MANY = (tile, warps, programs)
            triton_step._cut.cache_clear()
            settings = {"kv_heads": kv_heads, "batch": batch, "tile": tile, "warps": warps, "programs": programs}
            call = lambda: [step(slots, token, policy, 0.1) for slots in states]  # noqa: B023, E731
            times = graphed(call, len(states), settings)
            if times:
                record("sweep", **settings, **times)


def kernels() -> None:
    """The time of each kernel alone."""
    for kv_heads, batch in ((32, 1), (32, 48), (32, 384), (8, 1), (8, 48), (8, 384)):
        shape, policy = (batch, 32, kv_heads, 128), parse_policy("tova:512")
        states = [filled(policy, shape, torch.bfloat16) for _ in range(24 if batch == 1 else 3)]
        token = random_token(states[0], 32)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                for slots in states:
                    step(slots, token, policy, 0.1)
            torch.cuda.synchronize()
        for row in profiler.key_averages():
            if row.key in ("attend", "finish"):
                us = row.device_time_total / row.count
                record("kernel", name=row.key, kv_heads=kv_heads, batch=batch, us=us, count=row.count)


def sanitize() -> None:
    """Small cases under compute-sanitizer, with and without a decision stream."""
    for text, shape in (("tova:40", (2, 8, 2, 64)), ("h2o:70", (2, 4, 4, 80)), ("tova:513", (1, 4, 4, 128)),
                        ("h2o:70,gain=value_norm", (2, 8, 4, 80)), ("tova:513,kv=int8", (1, 4, 4, 128)),
                        ("h2o:70,kv=k8v4", (2, 8, 4, 80)))[slice(None if ON_GPU else 1)]:  # fmt: skip
        for window in (None, 30):
            policy, attention = parse_policy(text), Attention(0.1, window=window)
            slots = filled(policy, shape, torch.bfloat16, window)
            for stream in (nullcontext(), DecisionStream(DEVICE), nullcontext()):
                with stream:
                    triton_step.step(slots, *random_token(slots, shape[1]), policy, attention)
                slots.seen += 1
    synchronize()
    record("sanitized")


def main() -> None:
    parts = {"check": check, "graphs": graphs, "time": timing, "layers": layers, "sweep": sweep, "kernels": kernels,
             "sanitize": sanitize}  # fmt: skip
    run_parts(parts, __doc__)


if __name__ == "__main__":
    main()
