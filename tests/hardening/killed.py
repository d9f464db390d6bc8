"""Run by test_faults.py: forks children that save, evaluate or calibrate, and kills them with -9 at random moments.

Usage: killed.py WHAT FOLDER KILLS. The process imports once; every child is a fork of it.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from tqdm import tqdm

import msrnn
from msrnn.budgets.calibrate import Meter, Settings, calibrate, chunks_of
from msrnn.budgets.profile import dump
from msrnn.eval import tasks
from msrnn.eval.experiment import make_experiment
from msrnn.eval.record import read_lines, read_records
from msrnn.eval.run import run
from msrnn.system.files import write_text
from tests.support import tiny_eval
from tests.support.models import tiny_llama

SEED = 9


def killed(work: Callable[[], None], after: float) -> bool:
    """Whether the child was killed before it was done."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def finished(work: Callable[[], None]) -> float:
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return time.monotonic() - start


def kill_until_done(work: Callable[[], None], took: float, dice: random.Random) -> Iterator[None]:
    """One kill after another, each later than the last may be: a machine that has become slow gets there too."""
    for attempt in itertools.count():
        if not killed(work, dice.uniform(0, took * (1 + attempt / 8))):
            return
        yield


def saving(folder: Path, kills: int) -> None:
    """At every moment the file is one of the two states, whole."""
    rnn, path, dice = msrnn.RNN(tiny_llama(), "h2o:32"), folder / "state", random.Random(SEED)
    states = [rnn.read(torch.randint(3, 64, (60,)).tolist(), rnn.start())[1] for _ in range(2)]
    keys = [state.layers[0].keys.clone() for state in states]

    def work() -> None:
        for turn in range(10**6):
            states[turn % 2].save(path)

    states[0].save(path)
    rnn.load(path)
    count = 0
    while count < kills:
        count += killed(work, dice.uniform(0.001, 0.05))
        layers = rnn.load(path).layers
        assert any(torch.equal(layers[0].keys, one) for one in keys)
    states[1].save(path)
    assert torch.equal(rnn.load(path).layers[0].keys, keys[1])
    assert os.listdir(folder) == ["state"], "what killed processes left is removed"


def essence(path: Path) -> list[Any]:
    """Records without what differs from run to run."""
    skip = ("seconds", "peak_bytes", "date", "command", "machine", "commit")
    return [{name: value for name, value in asdict(one).items() if name not in skip} for one in read_records(path)]


def evaluating(folder: Path, kills: int) -> None:
    """Runs that are killed again and again: at the end each has the records of an undisturbed one, each once."""
    data, dice = tiny_eval.texts(folder / "data", books=2, words=50), random.Random(SEED)
    table = {"task": "pg19", "data": str(data), "policies": ["full", "tova:16"], "batch": 1, "chunk": 64}
    experiment, model, tokenizer = make_experiment(table, tasks.settings()), tiny_eval.model(), tiny_eval.tokenizer()

    def work(out: Path) -> None:
        run(experiment, model, tokenizer, out, quiet=True)

    plain = folder / "plain.jsonl"
    work(folder / "warm.jsonl")  # what children need is compiled before they are forked
    took = finished(lambda: work(plain))
    count = number = 0
    while count < kills:
        number += 1
        out = folder / f"{number}.jsonl"
        count += sum(1 for _ in kill_until_done(lambda: work(out), took, dice))  # noqa: B023 (called now)
        work(out)
        assert essence(out) == essence(plain), out
        lines = [line for _, line in read_lines(out.with_suffix(".samples.jsonl")) if "sample" in line]
        pairs = [(line["policy"], line["sample"]) for line in lines]
        assert len(pairs) == len(set(pairs)), "a sample was measured twice"


def calibrating(folder: Path, kills: int) -> None:
    model, dice = tiny_llama(), random.Random(SEED)
    chunks = chunks_of(torch.randint(0, 64, (128,), generator=torch.Generator().manual_seed(0)).tolist(), 64, 2)

    def work(path: Path) -> None:
        meter = Meter(model, chunks, Settings(grid=(4, 8, 16), rounds=0, batch=2), f"{path}.measured.jsonl")
        write_text(path, dump(calibrate(meter, [8], {}, "0")))

    plain = folder / "plain.json"
    work(folder / "warm.json")
    took = finished(lambda: work(plain))
    count = number = 0
    while count < kills:
        number += 1
        path = folder / f"{number}.json"
        for _ in kill_until_done(lambda: work(path), took, dice):  # noqa: B023 (called now)
            count += 1
            assert not path.exists() or json.loads(path.read_text())
        work(path)
        assert path.read_text() == plain.read_text(), path


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)  # a process that hangs says where
    torch.set_num_threads(1)
    os.environ["MSRNN_COMMIT"] = "tests"  # no git: what a killed process has started lives on
    tqdm.set_lock(RLock())  # its own is shared by forks: one that is killed with it would stop all others
    tqdm.monitor_interval = 0  # no thread that may hold the lock during a fork
    {"saving": saving, "eval": evaluating, "calibrate": calibrating}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
    print("done")
