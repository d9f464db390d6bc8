"""Records as a run would write them, with invented numbers: for tests of what reads records."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from msrnn.analysis.policy_names import policy_capacity
from msrnn.eval.record import Record

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
SHIFT = {"baseline": 3.0, "window": 300.0, "window+4": 1.3, "h2o": 1.2, "tova-head": 1.5, "tova": 0.8, "tova+4": 0.83}


def record(task: str, policy: str, metric: str, value: float, **changes: Any) -> Record:
    base = Record(
        task=task, model="Tiny", policy=policy, capacity=policy_capacity(policy), metric=metric,
        value=value, low=None, high=None, samples=3, groups=3, seed=0, dtype="float32", machine="a machine",
        versions={"torch": "2", "msrnn": "0.1.0"}, commit="abc1234", date="2026-01-01T00:00:00+00:00", seconds=2.0,
        peak_bytes=1 << 20, run="r", command="msrnn eval experiments/some.toml",
    )  # fmt: skip
    return replace(base, **changes)


def perplexity(task: str, policy: str, mean: float, seed: int = 0, **changes: Any) -> Record:
    """Three books that differ, in the same way for every policy."""
    dice = random.Random(seed)
    parts = {f"book{i}": {"nll": 1000 * (mean + 0.1 * i + 0.002 * dice.random()), "tokens": 1000.0} for i in range(3)}
    value = math.exp(sum(part["nll"] for part in parts.values()) / 3000)
    shape = {"value": value, "low": value * 0.9, "high": value * 1.1, "parts": parts} | changes
    return record(task, policy, "perplexity", **shape)


def pg19() -> list[Record]:
    records = [perplexity("pg19", "full", 3.0, peak_bytes=90 << 20)]
    for family, shift in SHIFT.items():
        for size in SIZES:
            far = shift * (math.log2(4096 / size) / 6) ** 1.5
            cost = {"peak_bytes": size << 14, "seconds": 1 + size / 4096}
            records.append(perplexity("pg19", f"{family}:{size}", 3.0 + math.log1p(far), seed=size, **cost))
    return records


def scores() -> list[Record]:
    records = []
    for task, metric in (("squality", "rouge"), ("qasper", "f1")):
        records.append(record(task, "full", metric, 20.0, low=18.0, high=22.0))
        for family, shift in (("tova", 0.9), ("window+4", 2.2), ("h2o", 1.8), ("baseline", 6.0)):
            for size in SIZES[2:]:
                value = 20 - shift * math.log2(4096 / size)
                records.append(record(task, f"{family}:{size}", metric, value, low=value - 1, high=value + 1))
    return records


def extrapolation() -> list[Record]:
    records = []
    for policy, positions, slope in (
        ("full", "plain", 3.0), ("tova:512", "plain", 0.3), ("tova:512", "gaps", 0.05), ("window+4:512", "plain", 0.5),
        ("window+4:512", "relative", 0.2),
    ):  # fmt: skip
        for position in range(1000, 70_001, 1000):
            for metric, start in (("running perplexity", 15.0), ("perplexity", 15.5)):
                value = start * math.exp(slope * max(0, position - 8000) / 60_000) + math.sin(position) * 0.2
                cell = {"positions": positions, "position": position}
                records.append(record("extrapolation", policy, metric, value, cell=cell, low=value - 1, high=value + 1))
    return records


def recall() -> list[Record]:
    records = []
    for policy, reach in (("full", 1.0), ("tova:512", 0.5), ("window+4:512", 0.2)):
        for kind in ("passkey", "needle"):
            for length in (1024, 2048, 4096):
                for depth in (0.0, 0.5, 1.0):
                    value = min(1.0, reach * (0.6 + 0.5 * depth) * (1024 / length) ** 0.2)
                    cell = {"kind": kind, "length": length, "depth": depth}
                    records.append(record("needle", policy, "recall", value, cell=cell))
        for turns in (0, 2, 4, 8):
            records.append(record("turns", policy, "recall", reach ** (turns / 4), cell={"turns": turns}))
    return records


def retention() -> list[Record]:
    return [replace(one, settings={"length": 4096}) for one in _retention()]


def _retention() -> list[Record]:
    records = []
    for policy, base in (("tova:256", 249.0), ("tova-head:256", 249.0), ("tova:512", 481.0)):
        records.append(record("retention", policy, "steps kept", base))
        for index, name in enumerate(("POS", "''", ".", "newline", "NNP", "NN", "DT", "TO", "$")):
            value = base * (4 / (index + 1)) ** 0.6
            cell = {"class": name}
            records.append(
                record("retention", policy, "steps kept", value, cell=cell, samples=50 - 5 * index, low=value * 0.9,
                       high=value * 1.1)
            )  # fmt: skip
        for layer in range(12):
            share = 0.5 + 0.4 * math.sin(layer + base / 300) ** 2
            records.append(record("retention", policy, "recent share", share, cell={"layer": layer}))
            if layer:
                older = "agreement of layers on older tokens"
                records.append(record("retention", policy, older, 0.4 / layer, cell={"distance": layer}))
        for power in range(12):
            value = min(1.0, (base / 8 / 2**power) ** 0.3)
            records.append(record("retention", policy, "held by age", value, cell={"age": 2**power}))
        for name, value in (("recent share", 0.74), ("first token held", 0.9), ("tokens 2 to 25 held", 0.1)):
            records.append(record("retention", policy, name, value, low=value - 0.05, high=value + 0.05))
    return records


def everything() -> list[Record]:
    return [*pg19(), *scores(), *extrapolation(), *recall(), *retention()]
