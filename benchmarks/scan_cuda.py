"""The Triton scan on a GPU: is it right, how long does a token take, and beside the matmuls and a whole prompt?

`PYTHONPATH=src python benchmarks/scan_cuda.py check time model --out results/scan.jsonl` (needs torch and transformers;
numba may be missing). Every record holds machine, versions, shapes, the median and the spread (smallest, largest).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda import poisoned, record, timed, write
from torch import Tensor

from msrnn.core.attention import Attention, mix
from msrnn.kernels import NEVER
from msrnn.kernels.torch import scan as eager
from msrnn.kernels.triton import compact as gpu_rows
from msrnn.kernels.triton import scan as gpu
from msrnn.policy import Policy, parse


def chunk(
    policy: Policy, batch: int, heads: int, kv_heads: int, rows: int, held: int, *,
    like: str = "flat", padded: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Logits, births, steps and scores of a chunk after `held` tokens.

    flat: every logit drawn alone, the closest race between columns. kept: columns keep their standing from row to row,
    as attention does. bf16: products of bf16 vectors, rounded to bf16 once more, so that many are equal.
    """
    units = {"layer": 1, "kv_head": kv_heads, "query_head": heads}[policy.scope]
    real = torch.rand(batch, rows, device="cuda") > 0.3 if padded else torch.ones(batch, rows, dtype=torch.bool).cuda()
    seen = held + torch.randint(0, 50, (batch, 1), device="cuda")
    steps = torch.where(real, seen + real.cumsum(1) - 1, -1)
    old = torch.rand(batch, units, held, device="cuda").argsort(-1)
    if padded:
        old[torch.rand_like(old, dtype=torch.float32) < 0.1] = -1
    births = torch.cat([old, steps[:, None].expand(-1, units, -1)], 2)
    logits = torch.randn(batch, heads, rows, held + rows, device="cuda", dtype=dtype)
    if like == "bf16":
        query, keys = (torch.randn(batch, heads, n, 64, device="cuda").bfloat16() for n in (rows, held + rows))
        logits = (query @ keys.mT / 4).to(dtype)
    if like == "kept":
        logits += 2 * torch.randn(batch, heads, 1, held + rows, device="cuda", dtype=dtype)
        logits += 2 * torch.randn(batch, 1, 1, held + rows, device="cuda", dtype=dtype)
    scores = torch.rand(births.shape, device="cuda", dtype=dtype) if policy.momentum else None
    return logits, births, steps, scores


def referee(
    got: eager.Scanned, logits: Tensor, births: Tensor, steps: Tensor, scores: Tensor | None, policy: Policy,
    window: int | None, sinks: Tensor | None,
) -> tuple[float, float, float]:  # fmt: skip
    """Replay the evictions in float64: the worst regret, the worst weight, the worst score. Wrong victims raise."""
    batch, heads, rows, columns = logits.shape
    units, limit = births.shape[1], policy.capacity
    ends = got.expiry if window is None else torch.minimum(got.expiry, births + (window - 1))
    ends = torch.where(births < 0, -1, ends)
    score = torch.zeros(births.shape, dtype=torch.float64, device="cuda") if scores is None else scores.double()
    regret, error = 0.0, 0.0
    for row in range(rows):
        now = steps[:, row, None, None]
        seen = (births >= 0) & (births <= now) & (ends >= now)
        exact = logits[:, :, row].double().masked_fill(~seen.repeat_interleave(heads // units, 1), -torch.inf)
        if sinks is not None:
            sink = sinks.double().view(1, -1, 1).expand(batch, -1, 1)
            exact = torch.cat([exact, sink], -1).softmax(-1)[..., :-1]
        else:
            exact = exact.softmax(-1).nan_to_num(0)
        softmax = got.weights[:, :, row].double() / (1 if got.mass is None else got.mass[:, :, row].double())
        error = max(error, float((softmax - exact).abs().nan_to_num(torch.inf).max()))
        mean = exact.view(batch, units, heads // units, columns).mean(2)
        score = torch.where(now >= 0, policy.momentum * score + mean, score)
        by_age = torch.zeros_like(seen) if window is None else births + (window - 1) <= now
        staying = seen & ~by_age
        victim = staying & (got.expiry == now) & (now >= 0)
        due = staying.sum(-1) > (NEVER if limit is None else limit)
        assert torch.equal(victim.sum(-1), due.long()), f"row {row}: not one victim where one is due"
        free = staying & (births >= policy.first) & (births <= now - policy.last)
        assert not (victim & ~free).any(), f"row {row}: a protected column left"
        best = score.masked_fill(~free, torch.inf).amin(-1)
        worst = score.masked_fill(~victim, -torch.inf).amax(-1)
        regret = max(regret, float((worst - best).masked_fill(~due, 0).max()))
    return regret, error, float((got.scores.double() - score).abs().nan_to_num(torch.inf).max())


def check(shard: int = 0, shards: int = 1, tries: int = 3) -> None:
    """Fresh random inputs, poisoned memory: float64 as eager exactly, float32 refereed. Compiling takes most of it."""
    shapes = [(1, 32, 32, 128, 512), (3, 32, 8, 37, 300), (2, 9, 3, 128, 200), (1, 64, 8, 20, 2048), (5, 28, 4, 50, 0)]
    policies = ("tova:{k}", "tova+4:{k},last=8", "h2o:{k}", "h2o-layer:{k}", "tova-head:{k}", "tova-query-head:{k}",
                "tova:{k},momentum=0.9", "full")  # fmt: skip
    extras = ("", "window", "sinks", "padded", "kept", "bf16")
    cases = [(shape, text) for shape in shapes for text in policies]
    checked, wrong = 0, 0
    for index, (shape, text) in enumerate(cases):
        if index % shards != shard:
            continue
        policy = parse(text.format(k=max(shape[4] - 20, 16)))
        for extra in (extras[index % 6], extras[(index + 3 + index // 6) % 6]):
            for _ in range(tries):
                checked += 1
                wrong += not right(policy, shape, extra)
    record("checked", shard=f"{shard}/{shards}", cases=checked, wrong=wrong)


def right(policy: Policy, shape: tuple[int, ...], extra: str) -> bool:
    """One random chunk, held to eager in float64 and to the referee in float32; what is wrong is recorded."""
    heads, held = shape[1], shape[4]
    window = max(held - 40, 24) if extra == "window" else None
    sinks = torch.randn(heads, device="cuda") if extra == "sinks" else None
    like = extra if extra in ("kept", "bf16") else "flat"
    inputs = chunk(policy, *shape, like=like, padded=extra == "padded")
    wide = [None if t is None else t.double() if t.is_floating_point() else t for t in inputs]
    rest = (policy, window, None if sinks is None else sinks.double())
    with poisoned():
        got = gpu.scan(*inputs, policy, window, sinks)
        exact = gpu.scan(*wide, *rest)
    want = eager.scan(*wide, *rest)
    regret = error = scored = torch.inf
    try:
        regret, error, scored = referee(got, *inputs, policy, window, sinks)
    except AssertionError as wrong:
        print(wrong)
    agrees = torch.equal(exact.expiry, want.expiry)
    off = float((exact.weights / exact.mass - want.weights).abs().nan_to_num(torch.inf).max())
    off = max(off, float((exact.scores - want.scores).abs().nan_to_num(torch.inf).max()))
    fine = agrees and off < 1e-12 and regret < (1e-6 if policy.momentum else 1e-7) and error < 1e-5 and scored < 1e-4
    if not fine:
        record("WRONG", policy=str(policy), shape=shape, extra=extra, same_expiry=agrees, float64_off=off,
               regret=regret, weight_error=error, score_error=scored)  # fmt: skip
    return fine


def host(call: Callable[[], object]) -> float:
    """Microseconds the host needs to ask for a call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    spent = (time.perf_counter() - start) / 5 * 1e6
    torch.cuda.synchronize()
    return spent


CASES = [
    ("tova:512", 32, 32, 512, 128), ("tova:512", 32, 32, 512, 256), ("tova:2048", 32, 32, 2048, 256),
    ("tova-head:512", 32, 8, 512, 128), ("h2o:512", 32, 8, 512, 128), ("h2o-layer:512", 32, 32, 512, 128),
]  # fmt: skip


def timing(
    batches: tuple[int, ...] = (1, 8, 32), cases: list[Any] = CASES, likes: tuple[str, ...] = ("flat", "kept")
) -> None:
    for text, heads, kv_heads, held, rows in cases:
        policy = parse(text)
        for batch in batches:
            shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "rows": rows, "state": held}
            for like in likes:
                inputs = chunk(policy, batch, heads, kv_heads, rows, held, like=like)
                call = partial(gpu.scan, *inputs, policy)
                spent, asked = timed(call), host(call)
                record("scan", policy=text, like=like, **shape, per_token_us=spent["us"] / rows, **spent, host_us=asked)


def matmuls(batches: tuple[int, ...] = (1, 8, 32)) -> None:
    """The two matmuls of a chunk beside the scan, in a model with heads of 128: in its own bf16, and all in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, held, rows in ((32, 32, 512, 128), (32, 8, 512, 128), (32, 32, 2048, 256)):
            for batch in batches:
                shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "rows": rows, "state": held}
                query = torch.randn(batch, heads, rows, 128, device="cuda", dtype=dtype)
                stored = (batch, kv_heads, held + rows, 128)
                keys, values = (torch.randn(stored, device="cuda", dtype=dtype) for _ in "kv")
                attention = Attention(128**-0.5)
                weights = attention.logits(query, keys).softmax(-1)
                mass, out = torch.ones_like(weights[..., :1]), torch.empty_like(query)
                for name, call in (
                    ("logits", partial(attention.logits, query, keys)),
                    ("mix", partial(mix, weights, values, mass, out)),
                ):
                    spent = timed(call)
                    record(name, dtype=str(dtype)[6:], **shape, per_token_us=spent["us"] / rows, **spent)


def errors() -> None:
    """A chunk's output in bf16 against float64 on the same inputs, beside the error of eager attention in bf16."""
    for held, rows, spread in ((512, 128, 1.0), (512, 128, 3.0), (2048, 64, 2.0)):
        query = spread * torch.randn(1, 8, rows, 128, device="cuda", dtype=torch.bfloat16)
        keys, values = (torch.randn(1, 4, held + rows, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        attention, policy = Attention(128**-0.5), parse(f"tova:{held}")
        births, steps = torch.arange(held + rows).view(1, 1, -1).cuda(), torch.arange(held, held + rows)[None].cuda()
        got = gpu.scan(attention.logits(query, keys), births, steps, None, policy)
        now = steps[:, None, :, None]
        seen = (births[:, :, None] <= now) & (now <= got.expiry[:, :, None])
        k, v = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
        logits = (query.double() @ k.double().mT * attention.scale).masked_fill(~seen, -torch.inf)
        exact = logits.softmax(-1) @ v.double()
        plain = (query @ k.mT * attention.scale).masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32)
        eagerly = plain.to(torch.bfloat16) @ v
        mixed = torch.empty_like(query)
        mix(got.weights, values, got.mass, mixed)
        ours, theirs = (float((out.double() - exact).norm() / exact.norm()) for out in (mixed, eagerly))
        record("bf16 error", state=held, rows=rows, spread=spread, ours=ours, eager=theirs, ratio=ours / theirs)


def model(batches: tuple[int, ...] = (1, 32), length: int = 4096) -> None:
    """A whole prompt through 4 layers of the LLaMA-2-7B shape in bf16: the exact recurrence beside full attention.

    Random weights make flat attention: the worst case of the scan, unlike trained ones.
    """
    from transformers import LlamaConfig, LlamaModel

    import msrnn

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, num_key_value_heads=32, vocab_size=512, max_position_embeddings=length)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        made = LlamaModel(config).to(torch.bfloat16).eval()
    for batch in batches:
        ids = torch.randint(0, 512, (batch, length), device="cuda")
        shape = {"model": "4 layers of LLaMA-2-7B's shape, random weights", "batch": batch, "length": length}
        with torch.inference_mode():
            whole = timed(lambda: made(ids, use_cache=False), 3, 1.0)  # noqa: B023
            record("prompt", policy="full, SDPA", **shape, **whole)
            for rows in (128, 256):
                bounded = lambda: made(ids, past_key_values=msrnn.cache(made, "tova:512", chunk=rows))  # noqa: B023, E731
                spent = timed(bounded, 3, 1.0)
                per = spent["us"] / length / 4
                record("prompt", policy="tova:512", chunk=rows, **shape, per_token_and_layer_us=per, **spent,
                       times_full=spent["us"] / whole["us"])  # fmt: skip


def sanitize() -> None:
    """Small cases under compute-sanitizer: the scan, and the closing of gaps after it."""
    for text in ("tova:40", "h2o:40"):
        policy = parse(text)
        for window in (None, 30):
            made = chunk(policy, 2, 32, 4, 20, 50, padded=True)
            expiry = gpu.scan(*made, policy, window).expiry
            rows = tuple(torch.randn(2, 4, 70, 64, device="cuda") for _ in range(2))
            gpu_rows.compact(made[1].clone(), made[3], rows, expiry, 70, 50)
    torch.cuda.synchronize()
    record("sanitized")


def sweep() -> None:
    """Other block and tile sizes."""
    for rows, tile in ((16, 512), (8, 512), (8, 256), (16, 256)):
        gpu._ROWS, gpu._TILE = rows, tile
        print("ROWS", rows, "TILE", tile)
        timing((1, 32), [CASES[0], CASES[2], CASES[3]])


def main() -> None:
    parts = {"check": check, "time": timing, "matmuls": matmuls, "errors": errors, "model": model, "sanitize": sanitize,
             "sweep": sweep}  # fmt: skip
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
