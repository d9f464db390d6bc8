"""The Triton scan on a GPU: is it exact, how long does it take per token, next to the matmuls and for a whole prompt?

`PYTHONPATH=src python benchmarks/scan_cuda.py check time model --out results/scan.jsonl` (needs torch and transformers;
numba may be missing). Every record holds machine, versions, shapes, the median and the spread (smallest, largest).
Without a GPU: `TRITON_INTERPRET=1 python benchmarks/scan_cuda.py check`, on small shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu import DEVICE, ON_GPU, poisoned, record, run_parts, synchronize, timed
from torch import Tensor

from msrnn.core.attention import Attention, weighted_sum
from msrnn.core.slots import NEVER, Columns, unit_count
from msrnn.kernels.torch import compact as torch_compact
from msrnn.kernels.torch import encode as torch_encode
from msrnn.kernels.torch import scan as torch_scan
from msrnn.kernels.triton import compact as triton_compact
from msrnn.kernels.triton import encode as triton_encode
from msrnn.kernels.triton import scan as triton_scan
from msrnn.policy import Policy, parse_policy

PLAIN = Attention(1.0)  # the logits are given, so nothing but window and sinks matters to a scan


class Chunk(NamedTuple):
    """The first three arguments of a scan."""

    logits: Tensor  # [B, H, C, N]
    columns: Columns
    steps: Tensor  # [B, C]

    def double(self) -> Chunk:
        rows = (None if row is None or not row.is_floating_point() else row.double() for row in self.columns)
        wide = Columns(*rows)._replace(positions=self.columns.positions)
        return Chunk(self.logits.double(), wide, self.steps)


def chunk(
    policy: Policy, batch: int, heads: int, kv_heads: int, rows: int, held: int, *,
    like: str = "flat", padded: bool = False, dtype: torch.dtype = torch.float32,
) -> Chunk:  # fmt: skip
    """A random chunk after `held` tokens.

    flat: logits are independent, the closest race between columns. kept: a column's logits are similar from row to row,
    as in real attention. bf16: products of bf16 vectors, rounded to bf16 once more, so that many are equal. Where slots
    are quantised: products with keys in their format.
    """
    units = unit_count(policy, heads, kv_heads)
    real = torch.ones(batch, rows, dtype=torch.bool, device=DEVICE)
    if padded:
        real = torch.rand(batch, rows, device=DEVICE) > 0.3
    seen = held + torch.randint(0, 50, (batch, 1), device=DEVICE)
    steps = torch.where(real, seen + real.cumsum(1) - 1, -1)
    old = torch.rand(batch, units, held, device=DEVICE).argsort(-1)
    if padded:
        old[torch.rand_like(old, dtype=torch.float32) < 0.1] = -1
    positions = torch.cat([old, steps[:, None].expand(-1, units, -1)], 2)
    logits = torch.randn(batch, heads, rows, held + rows, device=DEVICE, dtype=dtype)
    if like == "bf16":
        query, keys = (torch.randn(batch, heads, n, 64, device=DEVICE).bfloat16() for n in (rows, held + rows))
        logits = (query @ keys.mT / 4).to(dtype)
    if like == "kept":
        logits += 2 * torch.randn(batch, heads, 1, held + rows, device=DEVICE, dtype=dtype)
        logits += 2 * torch.randn(batch, 1, 1, held + rows, device=DEVICE, dtype=dtype)
    if policy.kv is not None:
        sizes = ((heads, rows), (kv_heads, held + rows))
        query, keys = (torch.randn(batch, *size, 64, device=DEVICE) for size in sizes)
        keys = torch_encode.encode(keys, keys, policy.kv)[3]
        logits = Attention(0.25).logits(query, keys).clone().to(dtype)  # not in a buffer that others use
    unused = logits.new_zeros(0)  # keys and values: a scan reads neither
    scores = torch.rand(positions.shape, device=DEVICE, dtype=dtype) if policy.momentum else None
    gains = None
    if policy.gain is not None:  # as the norms of 64 normal values: about 8, none the same
        gains = torch.randn(batch, max(kv_heads, units), held + rows, 64, device=DEVICE, dtype=dtype).norm(dim=-1)
    return Chunk(logits, Columns(unused, unused, positions, scores, gains), steps)


def referee(scan: torch_scan.Scan, chunk: Chunk, policy: Policy, attention: Attention) -> tuple[float, float, float]:
    """Replay the evictions in float64: the worst regret, weight and score error. Wrong victims raise."""
    logits, columns, steps = chunk
    batch, heads, rows, size = logits.shape
    positions, window = columns.positions, attention.window
    units = positions.shape[1]
    expiry = scan.expiry if window is None else torch.minimum(scan.expiry, positions + (window - 1))
    expiry = torch.where(positions < 0, -1, expiry)
    score = torch.zeros(positions.shape, dtype=torch.float64, device=DEVICE)
    score = score if columns.scores is None else columns.scores.double()
    regret, error = 0.0, 0.0
    for row in range(rows):
        now = steps[:, row, None, None]
        visible = (positions >= 0) & (positions <= now) & (expiry >= now)
        weights = softmax(logits[:, :, row], visible, attention.sinks)
        total = 1 if scan.total is None else scan.total[:, :, row].double()
        difference = scan.weights[:, :, row].double() / total - weights
        error = max(error, float(difference.abs().nan_to_num(torch.inf).max()))
        if columns.gains is not None:
            weights = weights * columns.gains.double().repeat_interleave(heads // columns.gains.shape[1], 1)
        mean = weights.view(batch, units, heads // units, size).mean(2)
        score = torch.where(now >= 0, policy.momentum * score + mean, score)
        staying = visible if window is None else visible & (positions + (window - 1) > now)
        victim = staying & (scan.expiry == now) & (now >= 0)
        due = staying.sum(-1) > (NEVER if policy.capacity is None else policy.capacity)
        assert torch.equal(victim.sum(-1), due.long()), f"row {row}: not one victim where one is due"
        free = staying & (positions >= policy.first) & (positions <= now - policy.last)
        assert not (victim & ~free).any(), f"row {row}: a protected column left"
        lowest = score.masked_fill(~free, torch.inf).amin(-1)
        chosen = score.masked_fill(~victim, -torch.inf).amax(-1)
        regret = max(regret, float((chosen - lowest).masked_fill(~due, 0).max()))
    return regret, error, float((scan.scores.double() - score).abs().nan_to_num(torch.inf).max())


def same_codes(policy: Policy, columns: Columns, expiry: Tensor, stored: int, held: int) -> bool:
    """What a read does with quantised slots: encoded, decoded and moved as plain PyTorch does it, bit for bit.

    Encoding is PyTorch's on the CPU: on a GPU it divides by a constant through its reciprocal. Triton's interpreter has
    another rounding to bfloat16.
    """
    if policy.kv is None:
        return True
    batch, _, used = columns.positions.shape
    for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])):
        key, value = (torch.randn(batch, stored, used, 64, device=DEVICE).to(dtype) for _ in "kv")
        expected = [rows.to(DEVICE) for rows in torch_encode.encode(key.cpu(), value.cpu(), policy.kv)]
        with poisoned():
            rows = triton_encode.encode(key, value, policy.kv)
            again = torch.empty_like(key), torch.empty_like(value)
            triton_encode.decode(rows[:3], policy.kv, again)
        if not all(map(torch.equal, (*rows, *again), (*expected, *expected[3:]))):
            return False
        end = min(used, max(held, policy.capacity or 0))
        moved, wanted = ((columns.positions.clone(), *map(torch.clone, rows)) for _ in range(2))
        triton_compact.compact(moved[0], None, moved[1:], expiry, used, end)
        torch_compact.compact(wanted[0], None, wanted[1:], expiry, used, end)
        pairs = zip(moved, wanted, strict=True)
        if not all(torch.equal(ours[:, :, :end], theirs[:, :, :end]) for ours, theirs in pairs):
            return False
    return True


def softmax(logits: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """logits [B, H, N], visible [B, U, N] -> [B, H, N] in float64, 0 where nothing is visible."""
    masked = logits.double().masked_fill(~visible.repeat_interleave(logits.shape[1] // visible.shape[1], 1), -torch.inf)
    if sinks is None:
        return masked.softmax(-1).nan_to_num(0)
    sink = sinks.double().view(1, -1, 1).expand(len(logits), -1, 1)
    return torch.cat([masked, sink], -1).softmax(-1)[..., :-1]


SHAPES = (  # batch, query heads, KV heads, rows, tokens held
    [(1, 32, 32, 128, 512), (3, 32, 8, 37, 300), (2, 9, 3, 128, 200), (1, 64, 8, 20, 2048), (5, 28, 4, 50, 0)]
    if ON_GPU
    else [(1, 4, 2, 6, 14)]
)
POLICIES = ("tova:{k}", "tova+4:{k},last=8", "h2o:{k}", "h2o-layer:{k}", "tova-head:{k}", "tova-query-head:{k}",
            "tova:{k},momentum=0.9", "full", "tova:{k},gain=value_norm", "h2o:{k},gain=value_norm",
            "tova-query-head:{k},gain=value_norm", "tova:{k},kv=int8", "h2o:{k},kv=k8v4",
            "tova-query-head:{k},kv=k8v4")  # fmt: skip
EXTRAS = ("", "window", "sinks", "padded", "kept", "bf16")


def check(shard: int = 0, shards: int = 1, tries: int = 3 if ON_GPU else 1) -> None:
    """New random inputs, NaN-filled memory: float64 equals plain PyTorch, float32 passes the referee.

    Compilation takes most of the time.
    """
    cases = [(i + j, shape, text) for i, shape in enumerate(SHAPES) for j, text in enumerate(POLICIES)]
    checked, wrong = 0, 0
    for index, (turn, shape, text) in enumerate(cases):
        if index % shards != shard:
            continue
        policy = parse_policy(text.format(k=max(shape[4] - 20, 16)))
        for extra in (EXTRAS[turn % 6], EXTRAS[(turn + 3) % 6]):
            for _ in range(tries):
                checked += 1
                wrong += not passes(policy, shape, extra)
    record("checked", shard=f"{shard}/{shards}", cases=checked, wrong=wrong)


def passes(policy: Policy, shape: tuple[int, ...], extra: str) -> bool:
    """One random chunk, against plain PyTorch in float64 and the referee in float32; a failure is recorded."""
    heads, held = shape[1], shape[4]
    window = max(held - 40, 24) if extra == "window" else None
    sinks = torch.randn(heads, device=DEVICE) if extra == "sinks" else None
    attention = Attention(1.0, window=window, sinks=sinks)
    exact = Attention(1.0, window=window, sinks=None if sinks is None else sinks.double())
    like = extra if extra in ("kept", "bf16") else "flat"
    inputs = chunk(policy, *shape, like=like, padded=extra == "padded")
    with poisoned():
        single = triton_scan.scan(*inputs, policy, attention)
        double = triton_scan.scan(*inputs.double(), policy, exact)
    expected = torch_scan.scan(*inputs.double(), policy, exact)
    regret = error = score_error = torch.inf
    try:
        regret, error, score_error = referee(single, inputs, policy, attention)
    except AssertionError as wrong:
        print(wrong)
    same = torch.equal(double.expiry, expected.expiry)
    off = float((double.weights / double.total - expected.weights).abs().nan_to_num(torch.inf).max())
    gain = 1.0 if inputs.columns.gains is None else float(inputs.columns.gains.max())  # scores are that much larger
    scores_off = float((double.scores - expected.scores).abs().nan_to_num(torch.inf).max())
    codes = same_codes(policy, inputs.columns, single.expiry, max(shape[2], single.expiry.shape[1]), held)
    fine = codes and same and off < 1e-12 and scores_off < 1e-12 * gain and error < 1e-5
    fine = fine and regret < (1e-6 if policy.momentum else 1e-7) * gain and score_error < 1e-4 * gain
    if not fine:
        record("WRONG", policy=str(policy), shape=shape, extra=extra, same_codes=codes, same_expiry=same, regret=regret,
               float64_off=max(off, scores_off), weight_error=error, score_error=score_error)  # fmt: skip
    return fine


def host_microseconds(call: Callable[[], object]) -> float:
    """What a launch costs the host."""
    synchronize()
    start = time.perf_counter()
    for _ in range(5):
        call()
    spent = (time.perf_counter() - start) / 5 * 1e6
    synchronize()
    return spent


CASES = [
    ("tova:512", 32, 32, 512, 128), ("tova:512", 32, 32, 512, 256), ("tova:2048", 32, 32, 2048, 256),
    ("tova-head:512", 32, 8, 512, 128), ("h2o:512", 32, 8, 512, 128), ("h2o-layer:512", 32, 32, 512, 128),
    ("tova:512,gain=value_norm", 32, 32, 512, 128), ("h2o:512,gain=value_norm", 32, 8, 512, 128),
]  # fmt: skip


def timing(
    batches: tuple[int, ...] = (1, 8, 32), cases: list[Any] = CASES, likes: tuple[str, ...] = ("flat", "kept")
) -> None:
    for text, heads, kv_heads, held, rows in cases:
        policy = parse_policy(text)
        for batch in batches:
            shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "rows": rows, "state": held}
            for like in likes:
                inputs = chunk(policy, batch, heads, kv_heads, rows, held, like=like)
                call = partial(triton_scan.scan, *inputs, policy, PLAIN)
                times, host = timed(call), host_microseconds(call)
                record("scan", policy=text, like=like, **shape, per_token_us=times["us"] / rows, **times, host_us=host)


def matmuls(batches: tuple[int, ...] = (1, 8, 32)) -> None:
    """The two matmuls of a chunk, in a model with heads of 128: in its own bf16, and all in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        for heads, kv_heads, held, rows in ((32, 32, 512, 128), (32, 8, 512, 128), (32, 32, 2048, 256)):
            for batch in batches:
                shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "rows": rows, "state": held}
                query = torch.randn(batch, heads, rows, 128, device=DEVICE, dtype=dtype)
                stored = (batch, kv_heads, held + rows, 128)
                keys, values = (torch.randn(stored, device=DEVICE, dtype=dtype) for _ in "kv")
                attention = Attention(128**-0.5)
                weights = attention.logits(query, keys).softmax(-1)
                total, output = torch.ones_like(weights[..., :1]), torch.empty_like(query)
                for name, call in (
                    ("logits", partial(attention.logits, query, keys)),
                    ("mix", partial(weighted_sum, weights, values, total, output)),
                ):
                    times = timed(call)
                    record(name, dtype=str(dtype)[6:], **shape, per_token_us=times["us"] / rows, **times)


def errors() -> None:
    """A chunk's output in bf16 against float64 on the same inputs, next to the error of plain attention in bf16."""
    for held, rows, spread in ((512, 128, 1.0), (512, 128, 3.0), (2048, 64, 2.0)):
        query = spread * torch.randn(1, 8, rows, 128, device=DEVICE, dtype=torch.bfloat16)
        keys, values = (torch.randn(1, 4, held + rows, 128, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
        attention, policy = Attention(128**-0.5), parse_policy(f"tova:{held}")
        positions = torch.arange(held + rows, device=DEVICE).view(1, 1, -1)
        steps = torch.arange(held, held + rows, device=DEVICE)[None]
        logits = attention.logits(query, keys)
        scan = triton_scan.scan(logits, Columns(keys, values, positions), steps, policy, attention)
        now = steps[:, None, :, None]
        visible = (positions[:, :, None] <= now) & (now <= scan.expiry[:, :, None])
        k, v = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
        exact = (query.double() @ k.double().mT * attention.scale).masked_fill(~visible, -torch.inf)
        exact = exact.softmax(-1) @ v.double()
        weights = (query @ k.mT * attention.scale).masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32)
        plain, output = weights.to(torch.bfloat16) @ v, torch.empty_like(query)
        weighted_sum(scan.weights, values, scan.total, output)
        ours, theirs = (float((out.double() - exact).norm() / exact.norm()) for out in (output, plain))
        record("bf16 error", state=held, rows=rows, spread=spread, ours=ours, eager=theirs, ratio=ours / theirs)


def model(batches: tuple[int, ...] = (1, 32), length: int = 4096) -> None:
    """A whole prompt through 4 layers of the LLaMA-2-7B shape in bf16: the exact recurrence against full attention.

    Random weights make flat attention: the worst case of the scan, unlike trained ones.
    """
    from transformers import LlamaConfig, LlamaModel

    import msrnn

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, num_key_value_heads=32, vocab_size=512, max_position_embeddings=length)
    config._attn_implementation = "sdpa"
    with DEVICE:
        llama = LlamaModel(config).to(torch.bfloat16).eval()
    for batch in batches:
        ids = torch.randint(0, 512, (batch, length), device=DEVICE)
        shape = {"model": "4 layers of LLaMA-2-7B's shape, random weights", "batch": batch, "length": length}
        with torch.inference_mode():
            full = timed(lambda: llama(ids, use_cache=False), 3, 1.0)  # noqa: B023
            record("prompt", policy="full, SDPA", **shape, **full)
            for rows in (128, 256):
                bounded = lambda: llama(ids, past_key_values=msrnn.cache(llama, "tova:512", chunk=rows))  # noqa: B023, E731
                times = timed(bounded, 3, 1.0)
                per = times["us"] / length / 4
                record("prompt", policy="tova:512", chunk=rows, **shape, per_token_and_layer_us=per, **times,
                       times_full=times["us"] / full["us"])  # fmt: skip


def sanitize() -> None:
    """Small cases under compute-sanitizer: the scan, and `compact` after it."""
    for text in ("tova:40", "h2o:40", "h2o:40,gain=value_norm"):
        policy = parse_policy(text)
        for window in (None, 30):
            inputs = chunk(policy, 2, 32, 4, 20, 50, padded=True)
            expiry = triton_scan.scan(*inputs, policy, Attention(1.0, window=window)).expiry
            rows = tuple(torch.randn(2, 4, 70, 64, device=DEVICE) for _ in range(2))
            rows += () if inputs.columns.gains is None else (inputs.columns.gains[..., None],)
            triton_compact.compact(inputs.columns.positions.clone(), inputs.columns.scores, rows, expiry, 70, 50)
    synchronize()
    record("sanitized")


def sweep() -> None:
    """Other block and tile sizes."""
    for rows, tile in ((16, 512), (8, 512), (8, 256), (16, 256)):
        triton_scan._ROWS, triton_scan._TILE = rows, tile
        print("ROWS", rows, "TILE", tile)
        timing((1, 32), [CASES[0], CASES[2], CASES[3]])


def main() -> None:
    parts = {"check": check, "time": timing, "matmuls": matmuls, "errors": errors, "model": model, "sanitize": sanitize,
             "sweep": sweep}  # fmt: skip
    run_parts(parts, __doc__)


if __name__ == "__main__":
    main()
