"""The work that all peers do, in any environment with torch and transformers: read prompts, then go on after them.

A worker gives `serve` its runs: name -> (model, length, capacity) -> (cache, context manager for reading). What is no
cache is timed alone: name -> (model, capacity, job) -> result of a memory job. The job file has one JSON object per
line, each with `rows`, prompts of one length that are read together:
- "continuation": ids for each row, whose loss is measured;
- "new_tokens": so many are generated greedily;
- "memory": one row is read alone, for the peak of memory, and both phases are timed.
Results go to a file, one line each; what is there already is not done again.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
from peers_arguments import arguments
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

STEPS = 16  # tokens that are timed one by one after a prompt


def read(model, cache, context, rows):
    """All prompts in one forward, as the peers do it: the logits after them [B, V], and the seconds."""
    ids = torch.tensor(rows, device=model.device)
    places = torch.arange(ids.shape[1], device=model.device)  # kvpress knows a prompt by its cache_position
    start = clock(model)
    with context:
        options = {"logits_to_keep": 1, "position_ids": places[None], "cache_position": places}
        logits = model(input_ids=ids, past_key_values=cache, **options).logits[:, -1]
    return logits, clock(model) - start


def step(model, cache, ids, position):
    """Logits [B, T, V] of later tokens at their true positions: a cache may hold fewer tokens than it has read."""
    places = torch.arange(position, position + ids.shape[1], device=model.device)[None]
    return model(input_ids=ids, past_key_values=cache, position_ids=places).logits


def loss(model, cache, logits, rows, position):
    """Nats of each row's continuation, fed in one forward."""
    ids = torch.tensor(rows, device=model.device)
    logits = torch.cat([logits[:, None], step(model, cache, ids[:, :-1], position)], 1).float().log_softmax(-1)
    return (-logits.gather(2, ids[..., None])).sum((1, 2)).tolist()


def greedy(model, cache, logits, count, position):
    """`count` new ids for each row, and the seconds of a step."""
    new, start = [logits.argmax(-1)], clock(model)
    for offset in range(count - 1):
        new.append(step(model, cache, new[-1][:, None], position + offset)[:, -1].argmax(-1))
    seconds = (clock(model) - start) / max(1, count - 1)
    return torch.stack(new, 1).tolist(), seconds


def clock(model):
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def resident(name):
    """A line of /proc/self/status in bytes: VmRSS now, VmHWM the peak since the last reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def reset_peak(model):
    """Bytes in use now; the peak starts from here."""
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(model):
    return torch.cuda.max_memory_allocated() if model.device.type == "cuda" else resident("VmHWM")


def work(model, make, job):
    rows = job["rows"]
    length = len(rows[0])
    before = reset_peak(model)
    cache, context = make(model, length)
    logits, seconds = read(model, cache, context, rows)
    result = {"prefill_s": seconds, "peak_bytes": peak(model) - before}
    if "continuation" in job:
        return result | {"nll": loss(model, cache, logits, job["continuation"], length)}
    new, step_seconds = greedy(model, cache, logits, job.get("new_tokens", STEPS), length)
    return result | {"step_s": step_seconds} | ({} if job.get("memory") else {"ids": new})


def serve(runs, versions, timed=None):
    """Every job by every run that was asked for; a run that fails is named, and the others go on."""
    timed = timed or {}
    args = arguments([*runs, *timed])
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, attn_implementation="sdpa").eval()
    model.to(args.device)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(line["run"], line["id"]) for line in map(json.loads, lines)}
    failed = set()
    with torch.inference_mode(), args.out.open("a") as out:
        for name, job in pairs(args):
            if (name, job["id"]) in done or name in failed or time.time() > args.deadline:
                continue
            try:
                if name in timed:
                    result = timed[name](model, args.capacity, job)
                else:
                    make = runs[name]
                    result = measure(model, lambda model, length, run=make: run(model, length, args.capacity), job)
            except Exception as error:
                print(f"{name}, {job['id']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                failed.add(name)
                continue
            out.write(json.dumps({"run": name, "id": job["id"], "versions": versions, **result}) + "\n")
            out.flush()
    sys.exit(1 if failed else 0)


def pairs(args):
    """Runs with jobs: job by job, so that a part of them compares all runs; where memory is measured, run by run."""
    jobs = [json.loads(line) for line in args.jobs.read_text().splitlines()]
    if all(job.get("memory") for job in jobs):
        return [(name, job) for name in args.runs for job in jobs]
    return [(name, job) for job in jobs for name in args.runs]


def measure(model, make, job):
    """On a GPU a timed job runs twice, and the second counts: the first compiles kernels and grows the pool."""
    if job.get("memory") and model.device.type == "cuda":
        work(model, make, job)
    return work(model, make, job)
