"""msrnn beside its peers on the same work: kvpress's policies, transformers' own caches; results/peers.jsonl.

    python benchmarks/peers.py --data FOLDER [--device cuda] [--parts pg19 recall memory] [--minutes 30]

The same model (SmolLM2-135M), the same texts, the same number of tokens kept of a prompt:
- pg19: perplexity of the next tokens after a prompt, texts spread over each held-out book;
- recall: needles and RULER, greedy answers; the question is part of the prompt;
- memory: seconds of reading one prompt and of a step after it; on a GPU the peak bytes above the model's own as well.
A policy of kvpress reads the whole prompt with full attention and then drops tokens, and what comes later is added;
msrnn never holds more than `capacity` + 1. `--kvpress PYTHON` names the python that has kvpress (default: that of
.venv-kvpress), `--llamacpp PYTHON` one that has llama-cpp-python, for perplexity on a CPU, and `--vllm PYTHON` one that
has vLLM. The same command resumes; after a change of the code, give another --work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from msrnn.eval import metrics
from msrnn.eval.prompts import Resources
from msrnn.eval.record import Record, write_records
from msrnn.eval.task import Metric, Output, Sample, Task
from msrnn.eval.tasks import needle, ruler
from msrnn.hf.load import bundled
from msrnn.system import provenance

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "experiments"))
from books import split  # noqa: E402

KVPRESS = tuple(f"kvpress {n}" for n in ("TOVA", "SnapKV", "KeyDiff", "expected attention", "knorm", "streaming"))
RUNS = {
    "peers_msrnn.py": (
        *("transformers full", "msrnn tova", "msrnn fade", "msrnn h2o", "msrnn window+4"),
        *("msrnn best", "transformers sliding"),
    ),
    "peers_kvpress.py": KVPRESS,
    "peers_llamacpp.py": ("llama.cpp full", "llama.cpp shift"),
    "peers_vllm.py": ("vllm full", "vllm fp8", "vllm msrnn best"),
}
MEMORY_RUNS = {  # the most telling first, for a time limit
    "peers_kvpress.py": KVPRESS,
    "peers_msrnn.py": (
        *("transformers full", "msrnn tova", "msrnn engine tova", "msrnn best"),
        *("transformers sliding", "transformers static", "msrnn fade", "msrnn engine best"),
    ),
}
QUANTISED = ("transformers quantised, 4 bits", "transformers quantised, 2 bits")  # where optimum-quanto is installed
KEEP_ALL = ("transformers full", "transformers static", "llama.cpp full", "vllm full", "vllm fp8", *QUANTISED)
RULER_KINDS = ("niah_single_1", "niah_single_2", "niah_multikey_1", "niah_multivalue", "vt")
NEW_TOKENS = 64
Job = dict[str, Any]
Results = dict[str, list[Job]]  # by run


def pg19_jobs(options: argparse.Namespace, resources: Resources) -> Iterator[Job]:
    size = options.prompt + options.continuation
    for book in split(Path(options.data))[1]:
        ids = resources.encode(book.read_text(encoding="utf-8")[:600_000])
        starts = [(1 + i) * (len(ids) - size) // (1 + options.texts) for i in range(options.texts)]
        rows = [ids[start : start + options.prompt] for start in starts]
        rest = [ids[start + options.prompt : start + size] for start in starts]
        yield {"id": book.stem, "rows": rows, "continuation": rest}


def recall_tasks(options: argparse.Namespace, resources: Resources) -> dict[str, Task]:
    kinds = ruler.Settings(RULER_KINDS, (options.recall_length,), options.samples)
    needles = needle.Settings(lengths=(options.recall_length,), repeats=max(1, options.samples // 2))
    return {"ruler": ruler.task(kinds, resources), "needle": needle.task(needles, resources)}


def alike(task: Task, resources: Resources) -> list[tuple[Sample, list[int]]]:
    """Prompts of one length, so that nothing is padded: the end of a longer text is cut, unless an answer is there."""
    prompts = [(sample, list(task.prompt(sample, None))) for sample in task.samples()]
    length = min(len(ids) for _, ids in prompts)
    cut = [(sample, list(task.prompt(sample, length))) for sample, _ in prompts]
    return [(sample, ids) for sample, ids in cut if len(ids) == length and _answered(sample, ids, resources)]


def _answered(sample: Sample, ids: list[int], resources: Resources) -> bool:
    content = sample.content
    answers = (content.number,) if isinstance(content, needle.Needle) else content.example.answers
    text = resources.tokenizer.decode(ids)
    return all(answer in text for answer in answers)


def recall_jobs(options: argparse.Namespace, resources: Resources) -> Iterator[Job]:
    for name, task in recall_tasks(options, resources).items():
        prompts = alike(task, resources)
        for start in range(0, len(prompts), options.batch):
            part = prompts[start : start + options.batch]
            names, rows = [sample.id for sample, _ in part], [ids for _, ids in part]
            yield {"id": f"{name}/{start}", "samples": names, "rows": rows, "new_tokens": NEW_TOKENS}


def memory_jobs(options: argparse.Namespace, resources: Resources) -> Iterator[Job]:
    text = split(Path(options.data))[1][0].read_text(encoding="utf-8")
    ids = resources.encode(text)
    ids = ids * (1 + max(options.lengths) // len(ids))
    yield from ({"id": str(length), "rows": [ids[:length]], "memory": True} for length in options.lengths)


JOBS = {"pg19": pg19_jobs, "recall": recall_jobs, "memory": memory_jobs}


def do(part: str, options: argparse.Namespace, jobs: list[Job]) -> Iterator[Results]:
    """Results by run after each worker, measured where they are not there yet; of a worker that failed, those it has.

    Qualities are compared on jobs that all runs have done; times and bytes stand for themselves.
    """
    path, out = write_jobs(part, options, jobs)
    for script, runs in (MEMORY_RUNS if part == "memory" else RUNS).items():
        if not (chosen := in_order(present(script, runs), options.runs)):
            continue
        python, model = worker(script, part, options)
        if python is None:
            continue
        command = [python, str(HERE / script), "--model", model, "--jobs", str(path), "--out", str(out)]
        command += ["--capacity", str(options.capacity), "--threads", str(options.threads), "--runs", *chosen]
        command += ["--device", options.device, "--dtype", options.dtype, "--deadline", str(options.deadline)]
        if time.time() < options.deadline:
            run_worker(command, options.limit)
        yield by_run(out, together=part != "memory")


def write_jobs(part: str, options: argparse.Namespace, jobs: list[Job]) -> tuple[Path, Path]:
    """The file of the jobs and that of their results, which is another for other jobs or settings."""
    text = "".join(json.dumps(job) + "\n" for job in jobs)
    settings = [options.model, options.gguf, options.device, options.dtype, options.threads, text]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    name = f"{part}.{options.capacity}.{digest}"
    path = options.work / f"{name}.jobs.jsonl"
    path.write_text(text)
    return path, options.work / f"{name}.results.jsonl"


def run_worker(command: list[str], limit: float | None) -> None:
    """What a worker has written counts, however it ends."""
    script = Path(command[1]).name
    try:
        if code := subprocess.run(command, timeout=limit).returncode:
            print(f"{script} ended with exit code {code}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"{script} was ended after {limit:.0f} s", flush=True)


def in_order(runs: tuple[str, ...], prefixes: list[str]) -> list[str]:
    """The runs whose names begin so, in the order of the prefixes."""
    return list(dict.fromkeys(run for prefix in prefixes for run in runs if run.startswith(prefix)))


def present(script: str, runs: tuple[str, ...]) -> tuple[str, ...]:
    """The runs of a script, with those that need a package where it is installed."""
    quantised = script == "peers_msrnn.py" and find_spec("optimum.quanto" if find_spec("optimum") else "optimum")
    return (*runs, *QUANTISED) if quantised else runs


def worker(script: str, part: str, options: argparse.Namespace) -> tuple[str | None, str]:
    """The python that runs a script (None: leave it out) and the model that it takes."""
    if script == "peers_llamacpp.py":
        return options.llamacpp if part == "pg19" else None, str(options.gguf)
    if script == "peers_vllm.py":
        return options.vllm if part == "pg19" else None, options.model
    python = options.kvpress if script == "peers_kvpress.py" else sys.executable
    if not Path(python).exists():
        print(f"{script} is left out: there is no {python}; run `make .venv-kvpress/.installed`")
        return None, options.model
    return python, options.model


def by_run(path: Path, together: bool) -> Results:
    """Lines of the results by run; `together`: of the jobs that all runs have done."""
    runs: dict[str, dict[str, Job]] = {}
    for one in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
        runs.setdefault(one["run"], {})[one["id"]] = one
    if not together:
        return {run: list(lines.values()) for run, lines in runs.items()}
    common = set.intersection(*(set(lines) for lines in runs.values())) if runs else set()
    return {run: [lines[name] for name in sorted(common)] for run, lines in runs.items()}


def pg19_records(options: argparse.Namespace, results: Results, _: Resources) -> Iterator[Record]:
    cell = {"work": "pg19", "prompt": options.prompt, "continuation": options.continuation}
    for run, lines in results.items():
        tokens = float(options.texts * options.continuation)
        parts = {one["id"]: {"nll": sum(one["nll"]), "tokens": tokens, "count": len(one["nll"])} for one in lines}
        yield quality(options, run, metrics.perplexity(), parts, cell, lines)


def recall_records(options: argparse.Namespace, results: Results, resources: Resources) -> Iterator[Record]:
    known = {}
    for name, task in recall_tasks(options, resources).items():
        known |= {(name, sample.id): (task, sample) for sample in task.samples()}
    jobs = {job["id"]: job["samples"] for job in recall_jobs(options, resources)}
    for run, lines in results.items():
        cells: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
        for one in lines:
            name = one["id"].partition("/")[0]
            for sample_id, ids in zip(jobs[one["id"]], one["ids"], strict=True):
                task, sample = known[name, sample_id]
                add(cells, name, sample, task.score(sample, output(resources, ids)))
        for (name, kind), parts in cells.items():
            metric = metrics.mean("match") if name == "ruler" else metrics.mean("recall")
            cell = {"work": name, "kind": kind, "length": options.recall_length}
            yield quality(options, run, metric, parts, cell, lines)


def output(resources: Resources, ids: list[int]) -> Output:
    """The ids before the first end of text or of a message."""
    ends = {resources.tokenizer.eos_token_id}
    stop = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return Output(ids=ids[:stop], text=resources.tokenizer.decode(ids[:stop], skip_special_tokens=True))


def add(cells: dict, name: str, sample: Sample, rows: list[Any]) -> None:
    for row in rows:
        part = cells.setdefault((name, str(row.cell["kind"])), {}).setdefault(sample.group, {})
        for column, value in row.columns.items():
            part[column] = part.get(column, 0.0) + value


def memory_records(options: argparse.Namespace, results: Results, _: Resources) -> Iterator[Record]:
    names = {"prefill seconds": "prefill_s", "step seconds": "step_s"}
    if options.device != "cpu":  # on a CPU a process keeps memory of earlier runs, so a peak would say nothing
        names |= {"peak bytes": "peak_bytes"}
    for run, lines in results.items():
        for one in lines:
            for metric, name in names.items():
                cell = {"work": "memory", "length": int(one["id"])}
                yield record(options, run, metric, (one[name], None, None), cell, [one], {})


RECORDS = {"pg19": pg19_records, "recall": recall_records, "memory": memory_records}


def quality(
    options: argparse.Namespace, run: str, metric: Metric, parts: dict[str, Any], cell: dict, lines: list[Job]
) -> Record:
    return record(options, run, metric.name, tuple(metrics.interval(parts, metric, 0)), cell, lines, parts)


def record(
    options: argparse.Namespace, run: str, metric: str, values: tuple, cell: dict, lines: list[Job], parts: dict
) -> Record:
    return Record(
        task="peers",
        model=Path(options.model).name,
        policy=run,
        capacity=None if run in KEEP_ALL else options.capacity,
        metric=metric,
        **dict(zip(("value", "low", "high"), values, strict=True)),
        samples=int(sum(part["count"] for part in parts.values())) or 1,
        groups=len(parts) or 1,
        seed=0,
        dtype=options.dtype,
        machine=provenance.machine(torch.device(options.device)),
        versions=lines[0]["versions"],
        commit=provenance.commit(),
        date=provenance.now(),
        seconds=round(sum(one["prefill_s"] for one in lines), 3),
        peak_bytes=max(one["peak_bytes"] for one in lines),
        run="peers",
        settings={"threads": options.threads, "new_tokens": NEW_TOKENS, "texts": options.texts},
        cell=cell,
        parts=parts,
        command=provenance.command(),
    )


def show(records: list[Record]) -> None:
    for one in records:
        edges = "" if one.low is None else f"[{one.low:.4g}, {one.high:.4g}]"
        where = " ".join(str(value) for value in one.cell.values())
        print(f"{one.policy:27} {where:32} {one.metric:15} {one.value:14.4f} {edges}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder with pg19/*.txt")
    parser.add_argument("--model", help="a folder (default: the bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--parts", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--continuation", type=int, default=128)
    parser.add_argument("--texts", type=int, default=3, help="of each book, read together")
    parser.add_argument("--recall-length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=6, help="of each kind of RULER")
    parser.add_argument("--batch", type=int, default=30, help="prompts that are answered together")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600, help="start no job after this time")
    parser.add_argument("--limit", type=float, help="seconds after which a worker is ended (default: none)")
    parser.add_argument("--kvpress", default=str(HERE.parent / ".venv-kvpress" / "bin" / "python"))
    parser.add_argument("--llamacpp", help="a python that has llama-cpp-python (default: none)")
    parser.add_argument("--vllm", help="a python that has vLLM (default: none)")
    parser.add_argument("--gguf", help="the model as a GGUF file, for llama.cpp")
    parser.add_argument("--runs", nargs="+", default=[""], help="those whose names begin so, in this order")
    parser.add_argument("--work", type=Path, default=Path("/tmp/msrnn-peers"), help="jobs and results so far")
    parser.add_argument("-o", "--out", type=Path, default=HERE.parent / "results" / "peers.jsonl")
    options = parser.parse_args()
    options.deadline = time.time() + 60 * options.minutes
    options.model = options.model or str(bundled())
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = arguments()
    resources = Resources(None, AutoTokenizer.from_pretrained(options.model), options.data)  # type: ignore[arg-type]
    for part in options.parts:
        start = time.monotonic()
        records: list[Record] = []
        for results in do(part, options, list(JOBS[part](options, resources))):
            records = list(RECORDS[part](options, results, resources))
            if part == "memory":  # no other worker changes these
                write_records(options.out, records)
        show(records)
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
        write_records(options.out, records)


if __name__ == "__main__":
    main()
