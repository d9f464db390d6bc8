"""1,000 mutations of our files: no crash, no wrong load, and no more memory than the file's size explains.

The seeds are the numbers of the mutations: `mutated(kind, number)` gives any of them again.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import msrnn
from msrnn.budgets.profile import dump, plan_for
from msrnn.core.trace import Trace
from msrnn.eval.record import read_records
from msrnn.hf import load as models
from tests.support import records
from tests.support.models import tiny_llama
from tests.support.tiny_gguf import write_gguf

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
COUNTS = {"state": 300, "trace": 200, "profile": 200, "records": 200, "gguf": 100}
ROOM = 64 << 20  # bytes that loading may take beside the file, for libraries that come into memory


class Target:
    """A valid file of a kind, how it is loaded, and what the result must be like."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / f"{kind}.bin"
        getattr(self, f"_{kind}")()
        self.bytes = self.path.read_bytes()

    def _state(self) -> None:
        rnn = msrnn.RNN(tiny_llama(), "h2o:10")
        _, state = rnn.read(list(range(3, 43)), rnn.start())
        state.save(self.path)
        want = [layer.tensors() for layer in state.layers]

        def check(result: Any) -> None:
            for ours, theirs in zip(want, result.layers, strict=True):
                assert all(torch.equal(ours[name], theirs.tensors()[name]) for name in ours), "a wrong state"

        self.load: Callable[[Path], Any] = rnn.load
        self.check: Callable[[Any], None] = check

    def _trace(self) -> None:
        rnn = msrnn.RNN(tiny_llama(), "tova:10")
        _, state = rnn.read(list(range(3, 43)), rnn.start(trace=True))
        state.trace.save(self.path)

        def check(trace: Any) -> None:
            assert trace.length < 1000
            for layer in range(len(trace.deaths)):
                assert trace.held(layer, 5).sum() <= trace.deaths[layer].numel()
                assert trace.ages(layer).min() >= 0

        self.load, self.check = Trace.load, check

    def _profile(self) -> None:
        curves = [[[4, 0.5], [8, 0.2], [64, 0.0]]] * 3
        about = {"name": "tiny", "type": "llama", "layers": 3, "weights": {"a": 0.5}}
        profile = {"average": 8, "capacities": [4, 8, 12], "allocations": {"16": [8, 16, 24]}, "model": about}
        self.path.write_text(dump(profile | {"curves": curves}))

        def check(plans: Any) -> None:
            for plan in plans:
                assert all(0 < policy.capacity < 2**31 for policy in plan.policies)

        self.load = lambda path: [plan_for(f"tova:{n},profile={path}", 3) for n in (8, 16, 32)]
        self.check = check

    def _records(self) -> None:
        lines = [json.dumps(asdict(one)) for one in records.everything()[::40]]
        self.path.write_text("\n".join(lines) + "\n")

        def check(result: Any) -> None:
            for record in result:
                assert isinstance(record.model, str)
                assert abs(record.value) < 1e30

        self.load, self.check = read_records, check

    def _gguf(self) -> None:
        self.path = self.path.with_suffix(".gguf")
        write_gguf(self.path)
        self.load = lambda path: models.load(path, dtype="float32")[0]
        self.check = lambda model: None  # a GGUF file has no checksum: other weights are other weights


def mutated(original: bytes, kind: str, number: int) -> bytes:
    """The mutation of this number."""
    dice = random.Random(f"{kind} {number}")
    data = bytearray(original)
    header = min(len(data), 1500)
    how = dice.choice(("flip", "flip in the header", "cut", "grow", "number", "huge", "swap", "word", "zeros"))
    place = dice.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << dice.randrange(8)
    elif how == "flip in the header":
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(header)] ^= 1 << dice.randrange(8)
    elif how == "cut":
        del data[place:]
    elif how == "grow":
        data[place:place] = dice.randbytes(dice.randint(1, 300))
    elif how == "number":  # a number in the text of a header, or of JSON
        digits = [i for i in range(header) if chr(data[i]).isdigit()] or [0]
        at = dice.choice(digits)
        data[at : at + 1] = dice.choice((b"-1", b"99999999999999", b"1e400", b"NaN", b"0", b"1" * 500, b"0.5"))
    elif how == "huge":  # a declared size
        at = dice.choice((0, 8, 16, dice.randrange(header) // 4 * 4))
        data[at : at + 8] = dice.choice((2**63 - 1, 2**40, 2**32, 10**9, 2**64 - 1)).to_bytes(8, "little")
    elif how == "swap":
        size = dice.choice((8, 64, 512))
        other = dice.randrange(len(data))
        one, two = bytes(data[place : place + size]), bytes(data[other : other + size])
        data[place : place + len(two)], data[other : other + len(one)] = two, one
    elif how == "word":
        words = (
            b'"I64"',
            b'"F64"',
            b'"BOOL"',
            b'"F8_E4M3"',
            b"null",
            b"[]",
            b"{}",
            b'"x"',
            b"true",
            b"NaN",
            b"[" * 3000,
        )
        at = data.find(b'"', place % header)
        end = data.find(b'"', at + 1) + 1
        data[at : max(end, at)] = dice.choice(words)
    else:
        data[place : place + dice.randint(1, 200)] = bytes(dice.randint(1, 200))
    return bytes(data)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
def test_mutations(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = Target(tmp_path, kind)
    target.check(target.load(target.path))
    file = tmp_path / f"mutated{target.path.suffix}"
    refused = 0
    before = resident()
    for number in range(COUNTS[kind]):
        file.write_bytes(mutated(target.bytes, kind, number))
        if kind != "gguf":
            tracemalloc.start()
        try:
            result = target.load(file)
            target.check(result)
        except ValueError as error:
            assert len(str(error)) < 2000, (kind, number)  # noqa: PT017
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"{kind}, mutation {number}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{kind}, mutation {number}: {type(error).__name__}: {error}") from error
        if kind != "gguf":
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 40 * len(target.bytes) + (1 << 20), (kind, number, peak)
        assert resident() - before < ROOM + 40 * len(target.bytes), (kind, number)
    assert refused > COUNTS[kind] // 4


def test_there_are_1000() -> None:
    assert sum(COUNTS.values()) == 1000


NAMES = {
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(2)>\"'",
    "a path": "../../../tmp/hostile",
    "an absolute path": "/etc/passwd",
    "mathtext": r"$\frac{1}{$ and $x^2$ \$",
    "control characters": "a\x00b\x1b[31m\nc\u202e",
    "very long": "x" * 5000,
    "nothing": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_in_reports_and_figures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from msrnn.cli import main

    hostile = NAMES[name]
    lines = records.pg19()[:9] + records.retention()[:12]
    changed = [replace(one, model=hostile, machine=hostile, command=hostile, commit=hostile) for one in lines]
    changed += [replace(one, policy=hostile, settings={hostile: hostile}) for one in lines[:3]]
    changed += lines
    folder = tmp_path / "some" / "deep" / "folder"
    folder.mkdir(parents=True)
    (folder / "r.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in changed))
    page, figures = folder / "report.html", folder / "figures"
    for command in (["report", str(folder), "-o", str(page)], ["plot", str(folder), "-o", str(figures)]):
        code = main(command)
        error = capsys.readouterr().err
        assert code in (0, 2), error
        assert "Traceback" not in error
        assert error.count("\n") <= 1, error
    if page.exists():
        text = page.read_text()
        assert "<script>alert" not in text
        assert "<img src=x" not in text
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents]
    assert not outside
    assert all(path.parent == figures for path in figures.rglob("*"))


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize(
    "change",
    [
        {"value": float("nan")}, {"value": float("inf")}, {"value": 1e308}, {"value": "12"}, {"value": None},
        {"value": [1]}, {"low": float("nan")}, {"capacity": 10**400}, {"capacity": "x"}, {"samples": 1.5},
        {"samples": 10**40}, {"cell": [1]}, {"cell": {"layer": {"a": 1}}}, {"cell": {"layer": float("nan")}},
        {"parts": {"book": {"nll": float("inf")}}}, {"parts": 3}, {"versions": {"torch": [1]}}, {"model": None},
        {"model": 3}, {"policy": ["tova"]}, {"date": 5}, {"settings": "x"}, {"seconds": -1e300}, {"seed": True},
    ],
)  # fmt: skip
def test_hostile_numbers_are_one_line(
    change: dict[str, Any], command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from msrnn.cli import main

    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(asdict(records.pg19()[0]) | change) + "\n")
    assert main([command, str(path), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "r.jsonl:1: not a record" in error
    assert len(error) < 500
