"""A run: every policy on every sample, batch by batch, into a log that survives a kill; then the log into records.

All policies take a batch before the next one comes, so the data are read and tokenized once, and what a stopped run
leaves behind compares policies on the same samples. Batches go round the groups: a part of a run is a fair part.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ..hf.cost import Peak
from ..rnn import fingerprint
from ..system.provenance import command, commit, machine, now, versions
from . import metrics, positions, tasks
from .experiment import Entry, Experiment
from .generation import write
from .prompts import Tools
from .record import Record, write_records
from .sample_log import Done, Log, alone, digest, run_key
from .scoring import short_nll, token_nll
from .task import Output, Row, Sample, Task


@dataclass(frozen=True)
class Work:
    """A sample with its prompt."""

    sample: Sample
    ids: NDArray[np.int32]
    digest: str


def run(
    experiment: Experiment,
    model: PreTrainedModel,
    tokenizer: Any,
    out: str | Path,
    *,
    minutes: float | None = None,
    quiet: bool = False,
) -> list[Record]:
    """Do what the log beside `out` does not have yet, and add the records of all that is done to `out`.

    With `minutes`, no batch is begun after that time.
    """
    tools = Tools(model, tokenizer, experiment.data, experiment.seed)
    task: Task = tasks.module(experiment.task).task(experiment.settings, tools)
    path = Path(out).with_suffix(".samples.jsonl")
    with alone(path):
        log = Log.open(path, run_key(_decisive(experiment, model)))
        tools.told = log.written
        bench = Bench(task, tools, log, experiment.batch, deadline(minutes), experiment.engine)
        works = bench.works(experiment.limit)
        entries = experiment.entries()
        bench.go(entries, works, quiet)
        records = list(bench.records(experiment, entries, works))
        write_records(out, records)
        return records


def free() -> None:
    """Give memory back to the GPU, that of objects in cycles too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def deadline(minutes: float | None) -> float:
    return float("inf") if minutes is None else time.monotonic() + 60 * minutes


def _decisive(experiment: Experiment, model: PreTrainedModel) -> dict[str, Any]:
    """What decides the numbers of a run, beside the prompts: those are known by their digests."""
    return {
        "task": experiment.task,
        "settings": asdict(experiment.settings),
        "model": fingerprint(model),
        "dtype": str(model.dtype),
        "seed": experiment.seed,
    }


@dataclass
class Bench:
    """A task on a model, with the log it writes to."""

    task: Task
    tools: Tools
    log: Log
    batch: int
    until: float = float("inf")
    engine: bool | None = None

    def works(self, limit: int | None) -> list[Work]:
        """All samples with their prompts, in turns from every group; with a limit, so many of them."""
        samples = in_turns(self.task.samples())[:limit]
        if not samples:
            raise ValueError(f"{self.task.name} has no samples: the texts are too short for these settings")
        prompts = [np.asarray(self.task.prompt(sample, None), dtype=np.int32) for sample in samples]
        pairs = zip(samples, prompts, strict=True)
        return [Work(sample, ids, digest(ids.tolist())) for sample, ids in pairs]

    def todo(self, entry: Entry, works: Iterable[Work]) -> list[Work]:
        """Those that this policy takes and has not done."""
        mine = (work for work in works if takes(entry, work.sample))
        return [work for work in mine if not self.log.has(entry.label, work.sample.id, work.digest + entry.mark)]

    def go(self, entries: Sequence[Entry], works: Sequence[Work], quiet: bool) -> None:
        left = sum(len(work.ids) for entry in entries for work in self.todo(entry, works))
        if not left or time.monotonic() >= self.until:
            return
        self.log.begin(self._where())
        with _bar(left, self.task.name, quiet) as bar:
            for batch in batches(works, self.batch, mixed=self.task.writes > 0):
                for entry in entries:
                    if time.monotonic() >= self.until:
                        return
                    todo = self.todo(entry, batch)
                    bar.set_postfix_str(entry.label, refresh=False)
                    self._finish(entry, todo)
                    bar.update(sum(len(work.ids) for work in todo))

    def _finish(self, entry: Entry, todo: Sequence[Work]) -> None:
        """Run and log; a batch that does not fit into memory is halved until it does."""
        if not todo:
            return
        copied = self._as_full(entry, todo)
        if copied:
            self.log.add(copied)
            return
        done = None
        try:
            done = self._measure(entry, todo)
        except torch.OutOfMemoryError:
            if len(todo) == 1:
                raise
        if done is not None:
            self.log.add(done)
            return
        free()  # here the error, and all that its frames held, is gone
        self._finish(entry, todo[: len(todo) // 2])
        self._finish(entry, todo[len(todo) // 2 :])

    def _as_full(self, entry: Entry, todo: Sequence[Work]) -> list[Done]:
        """A capacity that no text exceeds gives what the plain model gave."""
        longest = max(len(work.ids) for work in todo) + self.task.writes
        known = [self.log.done.get(("full", work.sample.id)) for work in todo]
        fresh = [done for done, work in zip(known, todo, strict=True) if done and done.digest == work.digest]
        if entry.label == "full" or not entry.never_evicts(longest) or len(fresh) < len(todo):
            return []
        return [replace(done, policy=entry.label, digest=done.digest + entry.mark) for done in fresh]

    def _measure(self, entry: Entry, todo: Sequence[Work]) -> list[Done]:
        began = time.perf_counter()
        with Peak(self.tools.device) as peak:
            outputs = self._outputs(entry, todo)
        if self.task.writes:
            free()  # an engine's static rows; the next policy has others
        seconds = (time.perf_counter() - began) / len(todo)
        done = []
        for work, output in zip(todo, outputs, strict=True):
            sample = work.sample
            rows = self.task.score(sample, output)
            _check(rows, entry, sample)
            said = output.text if self.task.writes else None
            facts = (rows, seconds, peak.bytes, said, output.ended, self.log.session)
            done.append(Done(entry.label, sample.id, sample.group, work.digest + entry.mark, *facts))
        return done

    def _outputs(self, entry: Entry, todo: Sequence[Work]) -> list[Output]:
        model, tools = self.tools.model, self.tools
        if self.task.writes:
            prompts = [self._prompt(entry, work) for work in todo]
            seeds = [seed_of(tools.seed, work.sample.id) for work in todo]
            how: dict[str, Any] = {"temperature": self.task.temperature, "seeds": seeds, "engine": self.engine}
            return write(model, tools.tokenizer, prompts, entry.policy, self.task.writes, **how)
        ids = torch.from_numpy(np.stack([work.ids for work in todo])).long()[:, : self.task.reach(entry.label)]
        if entry.piece:
            return [Output(nll=row.numpy()) for row in short_nll(model, ids, entry.piece, piece=self.task.piece)]
        moved = positions.mode(todo[0].sample.positions, model)
        found = token_nll(model, ids, entry.policy, piece=self.task.piece, positions=moved)
        return [Output(nll=row.numpy()) for row in found]

    def _prompt(self, entry: Entry, work: Work) -> list[int]:
        whole = work.ids.tolist() if entry.piece is None else self.task.prompt(work.sample, entry.piece)
        return list(whole)

    def _where(self) -> dict[str, Any]:
        return {
            "machine": machine(self.tools.device),
            "versions": versions(),
            "commit": commit(),
            "date": now(),
            "command": command(),
        }

    def records(self, experiment: Experiment, entries: Sequence[Entry], works: Sequence[Work]) -> Iterator[Record]:
        """One per policy, cell and metric, from the samples that all policies have done."""
        common = [work.sample for work in works if not any(self.todo(entry, [work]) for entry in entries)]
        for entry in entries:
            done = [self.log.done[entry.label, sample.id] for sample in common if takes(entry, sample)]
            where = self._conditions(done)
            for cell, parts, count in _cells(done):
                for metric in self.task.metrics:
                    if not metric.applies(parts):
                        continue
                    value, low, high = metrics.interval(parts, metric, experiment.seed)
                    yield Record(
                        task=self.task.name,
                        model=Path(str(self.tools.model.config.name_or_path)).name or "unnamed",
                        policy=entry.label,
                        capacity=entry.capacity,
                        metric=metric.name,
                        value=value,
                        low=low,
                        high=high,
                        samples=count,
                        groups=len(parts),
                        seed=experiment.seed,
                        dtype=str(self.tools.model.dtype).removeprefix("torch."),
                        seconds=round(sum(one.seconds for one in done), 3),
                        peak_bytes=max(one.peak_bytes for one in done),
                        run=self.log.run,
                        cell=cell,
                        settings=asdict(experiment.settings),
                        parts=parts,
                        **where,
                    )

    def _conditions(self, done: Sequence[Done]) -> dict[str, Any]:
        """Of the sessions in which these were done, each once."""
        used = [self.log.sessions[number] for number in sorted({one.session for one in done})]
        last = used[-1] if used else {"versions": {}}
        joined = {name: " + ".join(dict.fromkeys(one[name] for one in used)) for name in ("machine", "commit")}
        return joined | {name: last.get(name, "") for name in ("date", "command")} | {"versions": last["versions"]}


def takes(entry: Entry, sample: Sample) -> bool:
    """The plain model keeps all positions as they are, so nothing but plain ones is asked of it."""
    return entry.policy is not None or sample.positions == "plain"


def in_turns(samples: Iterable[Sample]) -> list[Sample]:
    """The first of every group, then the second of every group, and so on."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [one for round in zip_longest(*groups.values()) for one in round if one is not None]


def batches(works: Iterable[Work], size: int, mixed: bool) -> Iterator[list[Work]]:
    """At most `size` works that can go together: of one length, unless lengths may be mixed by padding."""
    waiting: dict[tuple[int, str], list[Work]] = {}
    for work in works:
        group = waiting.setdefault((0 if mixed else len(work.ids), work.sample.positions), [])
        group.append(work)
        if len(group) == size:
            yield list(group)
            group.clear()
    yield from (group for group in waiting.values() if group)


def seed_of(seed: int, sample: str) -> int:
    return int(run_key({"seed": seed, "sample": sample}), 16) >> 1


def _check(rows: Iterable[Row], entry: Entry, sample: Sample) -> None:
    bad = [name for row in rows for name, value in row.columns.items() if not np.isfinite(value)]
    if bad:
        raise ValueError(f"{entry.label} on {sample.id}: {bad[0]} is not a finite number; try --dtype float32")


def _cells(done: Iterable[Done]) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, float]], int]]:
    """Every cell with its columns summed by group, and how many samples are in it."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for one, row in chain.from_iterable(((one, row) for row in one.rows) for one in done):
        key = tuple(sorted(row.cell.items()))
        part = cells.setdefault(key, {}).setdefault(one.group, {})
        counts[key] = counts.get(key, 0) + 1
        for name, value in row.columns.items():
            part[name] = part.get(name, 0.0) + value
    for key, parts in cells.items():
        yield dict(key), parts, counts[key]


def _bar(total: int, name: str, quiet: bool) -> Any:
    from tqdm import tqdm

    seen = sys.stderr.isatty()  # in a log, a line now and then is enough
    pace = {"mininterval": 0.2 if seen else 10, "delay": 0.5 if seen else 10}
    return tqdm(total=total, desc=name, unit="tok", unit_scale=True, disable=quiet, **pace)
