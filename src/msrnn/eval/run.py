"""A run: every policy on every sample, batch by batch, into a log that survives a kill; then the log into records.

All policies take a batch before the next batch, so data are read and tokenized once, and a run that was stopped
compares policies on the same samples. Batches go round the groups, so a part of a run is a fair sample of it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ..hf.best import resolve
from ..hf.identity import model_identity
from ..system.console import progress
from ..system.memory import Peak
from ..system.provenance import command, commit, machine, now, versions
from . import metrics, positions, tasks
from .experiment import Entry, Experiment
from .generation import generate
from .perplexity import short_context_nll, token_nll
from .prompts import Resources
from .record import Record, write_records
from .sample_log import SampleLog, SampleResult, exclusive, ids_digest, run_key
from .task import Output, Row, Sample, Task


@dataclass(frozen=True)
class Prompt:
    """A sample with the ids of its prompt."""

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
    """Measure what the log beside `out` does not have yet, and append the records of everything measured to `out`.

    With `minutes`, no batch is started after that time.
    """
    resources = Resources(model, tokenizer, experiment.data, experiment.seed)
    task: Task = tasks.module(experiment.task).task(experiment.settings, resources)
    path = Path(out).with_suffix(".samples.jsonl")
    with exclusive(path):
        log = SampleLog.open(path, run_key(_deciding_settings(experiment, model)))
        resources.earlier_output = log.output
        runner = Runner(task, resources, log, experiment.batch, deadline(minutes), experiment.engine)
        prompts = runner.prompts(experiment.limit)
        length = getattr(experiment.settings, "length", None)  # where a text may be longer than the trained context
        entries = experiment.entries(lambda text: resolve(text, model, length=length))
        runner.run(entries, prompts, quiet)
        records = list(runner.records(experiment, entries, prompts))
        write_records(out, records)
        return records


def release_memory() -> None:
    """Give memory back to the GPU, that of objects in reference cycles too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def deadline(minutes: float | None) -> float:
    return float("inf") if minutes is None else time.monotonic() + 60 * minutes


def _deciding_settings(experiment: Experiment, model: PreTrainedModel) -> dict[str, Any]:
    """Everything that decides the numbers of a run, except the prompts: those are known by their digests."""
    return {
        "task": experiment.task,
        "settings": asdict(experiment.settings),
        "model": model_identity(model),
        "dtype": str(model.dtype),
        "seed": experiment.seed,
    }


@dataclass
class Runner:
    """A task on a model, with the log it writes to."""

    task: Task
    resources: Resources
    log: SampleLog
    batch: int
    deadline: float = float("inf")
    engine: bool | None = None

    def prompts(self, limit: int | None) -> list[Prompt]:
        """All samples with their prompts, round the groups; with a limit, so many of them."""
        samples = round_robin(self.task.samples())[:limit]
        if not samples:
            raise ValueError(f"{self.task.name} has no samples: the texts are too short for these settings")
        ids = [np.asarray(self.task.prompt(sample, None), dtype=np.int32) for sample in samples]
        return [Prompt(sample, part, ids_digest(part.tolist())) for sample, part in zip(samples, ids, strict=True)]

    def pending(self, entry: Entry, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Those that apply to this policy and are not in the log."""
        applicable = (prompt for prompt in prompts if applies(entry, prompt.sample))
        return [one for one in applicable if not self.log.has(entry.label, one.sample.id, _key(entry, one.digest))]

    def run(self, entries: Sequence[Entry], prompts: Sequence[Prompt], quiet: bool) -> None:
        tokens = sum(len(prompt.ids) for entry in entries for prompt in self.pending(entry, prompts))
        if not tokens or time.monotonic() >= self.deadline:
            return
        self.log.start_session(self._provenance())
        with progress(tokens, self.task.name, "tok", quiet) as bar:
            for batch in batches(prompts, self.batch, mixed=self.task.new_tokens > 0):
                for entry in entries:
                    if time.monotonic() >= self.deadline:
                        return
                    pending = self.pending(entry, batch)
                    bar.set_postfix_str(entry.label, refresh=False)
                    self._run_batch(entry, pending)
                    bar.update(sum(len(prompt.ids) for prompt in pending))

    def _run_batch(self, entry: Entry, batch: Sequence[Prompt]) -> None:
        """Measure and log; a batch that runs out of memory is halved until it fits."""
        if not batch:
            return
        results = self._copy_of_full(entry, batch)
        try:
            results = results or self._measure(entry, batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
        if results:
            self.log.add(results)
            return
        release_memory()  # here the error, and all that its frames held, is gone
        self._run_batch(entry, batch[: len(batch) // 2])
        self._run_batch(entry, batch[len(batch) // 2 :])

    def _copy_of_full(self, entry: Entry, batch: Sequence[Prompt]) -> list[SampleResult]:
        """The plain model's results, where the capacity is so large that nothing would be evicted; else nothing."""
        longest = max(len(prompt.ids) for prompt in batch) + self.task.new_tokens
        if entry.label == "full" or not entry.never_evicts(longest):
            return []
        full = [self.log.results.get(("full", prompt.sample.id)) for prompt in batch]
        current = [one for one, prompt in zip(full, batch, strict=True) if one and one.digest == prompt.digest]
        if len(current) < len(batch):
            return []
        return [replace(one, policy=entry.label, digest=_key(entry, one.digest)) for one in current]

    def _measure(self, entry: Entry, batch: Sequence[Prompt]) -> list[SampleResult]:
        start = time.perf_counter()
        with Peak(self.resources.device) as peak:
            outputs = self._outputs(entry, batch)
        if self.task.new_tokens:
            release_memory()  # an engine's static rows; the next policy has others
        seconds = (time.perf_counter() - start) / len(batch)
        pairs = zip(batch, outputs, strict=True)
        return [self._result(entry, prompt, output, seconds, peak.bytes) for prompt, output in pairs]

    def _result(self, entry: Entry, prompt: Prompt, output: Output, seconds: float, peak_bytes: int) -> SampleResult:
        sample = prompt.sample
        rows = self.task.score(sample, output)
        _check_finite(rows, entry, sample)
        return SampleResult(
            policy=entry.label,
            sample=sample.id,
            group=sample.group,
            digest=_key(entry, prompt.digest),
            rows=rows,
            seconds=seconds,
            peak_bytes=peak_bytes,
            text=output.text if self.task.new_tokens else None,
            ended=output.ended,
            session=self.log.session,
        )

    def _outputs(self, entry: Entry, batch: Sequence[Prompt]) -> list[Output]:
        return self._generated(entry, batch) if self.task.new_tokens else self._scored(entry, batch)

    def _generated(self, entry: Entry, batch: Sequence[Prompt]) -> list[Output]:
        ids = [self._ids(entry, prompt) for prompt in batch]
        options: dict[str, Any] = {
            "temperature": self.task.temperature,
            "seeds": [sample_seed(self.resources.seed, prompt.sample.id) for prompt in batch],
            "engine": self.engine,
        }
        model, tokenizer = self.resources.model, self.resources.tokenizer
        return generate(model, tokenizer, ids, entry.policy, self.task.new_tokens, **options)

    def _scored(self, entry: Entry, batch: Sequence[Prompt]) -> list[Output]:
        model, piece = self.resources.model, self.task.piece
        ids = torch.from_numpy(np.stack([prompt.ids for prompt in batch])).long()
        ids = ids[:, : self.task.max_tokens(entry.label)]
        if entry.context:
            return [Output(nll=row.numpy()) for row in short_context_nll(model, ids, entry.context, piece=piece)]
        scheme = positions.scheme(batch[0].sample.positions, model)
        nll = token_nll(model, ids, entry.policy, piece=piece, positions=scheme)
        return [Output(nll=row.numpy()) for row in nll]

    def _ids(self, entry: Entry, prompt: Prompt) -> list[int]:
        return list(prompt.ids.tolist() if entry.context is None else self.task.prompt(prompt.sample, entry.context))

    def _provenance(self) -> dict[str, Any]:
        return {
            "machine": machine(self.resources.device),
            "versions": versions(),
            "commit": commit(),
            "date": now(),
            "command": command(),
        }

    def records(self, experiment: Experiment, entries: Sequence[Entry], prompts: Sequence[Prompt]) -> Iterator[Record]:
        """One per policy, cell and metric, from the samples that all policies have done."""
        common = [prompt.sample for prompt in prompts if not any(self.pending(entry, [prompt]) for entry in entries)]
        for entry in entries:
            results = [self.log.results[entry.label, sample.id] for sample in common if applies(entry, sample)]
            for cell, parts, count in _cells(results):
                for metric in self.task.metrics:
                    if metric.applies(parts):
                        interval = metrics.interval(parts, metric, experiment.seed)
                        values: dict[str, Any] = {"metric": metric.name} | interval._asdict()
                        values |= {"cell": cell, "parts": parts, "samples": count, "groups": len(parts)}
                        yield Record(**values, **self._conditions(experiment, entry, results))

    def _conditions(self, experiment: Experiment, entry: Entry, results: Sequence[SampleResult]) -> dict[str, Any]:
        """What all records of one policy share; of the sessions that measured it, each machine and commit once."""
        sessions = [self.log.sessions[number] for number in sorted({result.session for result in results})]
        last = sessions[-1] if sessions else {"versions": {}}
        return {
            "task": self.task.name,
            "model": Path(str(self.resources.model.config.name_or_path)).name or "unnamed",
            "policy": entry.label,
            "capacity": entry.capacity,
            "seed": experiment.seed,
            "dtype": str(self.resources.model.dtype).removeprefix("torch."),
            "seconds": round(sum(result.seconds for result in results), 3),
            "peak_bytes": max(result.peak_bytes for result in results),
            "run": self.log.run,
            "settings": asdict(experiment.settings) | ({"policy": entry.resolved} if entry.resolved else {}),
            "versions": last["versions"],
            **{name: " + ".join(dict.fromkeys(one[name] for one in sessions)) for name in ("machine", "commit")},
            **{name: last.get(name, "") for name in ("date", "command")},
        }


def _key(entry: Entry, digest: str) -> str:
    """The digest of a prompt, and of the capacities by layer where they differ."""
    return digest + entry.capacities_digest


def applies(entry: Entry, sample: Sample) -> bool:
    """The plain model holds every token, so it is measured with plain positions only."""
    return entry.policy is not None or sample.positions == "plain"


def round_robin(samples: Iterable[Sample]) -> list[Sample]:
    """The first of every group, then the second of every group, and so on."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [sample for turn in zip_longest(*groups.values()) for sample in turn if sample is not None]


def batches(prompts: Iterable[Prompt], size: int, mixed: bool) -> Iterator[list[Prompt]]:
    """At most `size` prompts that can share a batch: of one length, unless lengths may be mixed by padding."""
    waiting: dict[tuple[int, str], list[Prompt]] = {}
    for prompt in prompts:
        group = waiting.setdefault((0 if mixed else len(prompt.ids), prompt.sample.positions), [])
        group.append(prompt)
        if len(group) == size:
            yield list(group)
            group.clear()
    yield from (group for group in waiting.values() if group)


def sample_seed(seed: int, sample: str) -> int:
    return int(run_key({"seed": seed, "sample": sample}), 16) >> 1


def _check_finite(rows: Iterable[Row], entry: Entry, sample: Sample) -> None:
    bad = [name for row in rows for name, value in row.columns.items() if not np.isfinite(value)]
    if bad:
        raise ValueError(f"{entry.label} on {sample.id}: {bad[0]} is not a finite number; try --dtype float32")


def _cells(results: Iterable[SampleResult]) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, float]], int]]:
    """Every cell with its columns summed by group, and how many samples are in it."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    counts: dict[tuple[Any, ...], int] = {}
    for group, row in ((result.group, row) for result in results for row in result.rows):
        key = tuple(sorted(row.cell.items()))
        part = cells.setdefault(key, {}).setdefault(group, {})
        counts[key] = counts.get(key, 0) + 1
        for name, value in row.columns.items():
            part[name] = part.get(name, 0.0) + value
    for key, parts in cells.items():
        yield dict(key), parts, counts[key]
