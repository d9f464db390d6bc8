"""vLLM on the jobs of benchmarks/peers.py: its own cache in 16 bits and in fp8, and msrnn's states in it.

Run by a python that has vLLM (on a CPU: .venv-vllm). A prompt and its continuation are one request whose losses vLLM
returns; a batch takes as many tokens as the prompt has, so what follows sees nothing but the cache. Every run is an
engine in a process of its own.
"""

import json
import os
import subprocess
import sys
import time

from peers_arguments import arguments

RUNS = {"vllm full": "auto", "vllm fp8": "fp8", "vllm msrnn best": "auto"}  # by run, the dtype of vLLM's cache
STEPS = 33  # tokens that are written one by one after a prompt


def engine(args, run, job):
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.pop("MSRNN_POLICY", None)
    if "msrnn" in run:
        os.environ["MSRNN_POLICY"] = f"best:{args.capacity}"
    from vllm import LLM

    length = len(job["rows"][0])
    return LLM(
        args.model,
        dtype=args.dtype,
        kv_cache_dtype=RUNS[run],
        max_model_len=length + len(job["continuation"][0]) + STEPS,
        max_num_batched_tokens=length,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
    ).llm_engine


def finish(engine, ids, **sampling):
    """The last answer to a request, and when each of its tokens came."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, ignore_eos=True, **sampling)
    engine.add_request(f"{time.monotonic()}", {"prompt_token_ids": ids}, options)
    answers, times, start = [], [], time.perf_counter()
    while engine.has_unfinished_requests():
        if new := engine.step():
            answers, times = new, [*times, time.perf_counter() - start]
    return answers[0], times


def work(engine, job):
    result = {"nll": [], "prefill_s": 0.0, "peak_bytes": 0}
    for row, continuation in zip(job["rows"], job["continuation"], strict=True):
        answer, _ = finish(engine, [*row, *continuation], max_tokens=1, prompt_logprobs=0)
        losses = answer.prompt_logprobs[len(row) :]
        result["nll"].append(-sum(one[token].logprob for one, token in zip(losses, continuation, strict=True)))
    _, times = finish(engine, job["rows"][0], max_tokens=STEPS)
    return result | {"prefill_s": times[0], "step_s": (times[-1] - times[0]) / (len(times) - 1)}


def main():
    args = arguments(RUNS)
    if len(args.runs) > 1:
        place = sys.argv.index("--runs")
        others = sys.argv[1:place] + sys.argv[place + 1 + len(args.runs) :]
        codes = [subprocess.run([sys.executable, __file__, *others, "--runs", run]).returncode for run in args.runs]
        sys.exit(max(codes))
    (run,) = args.runs
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {line["id"] for line in map(json.loads, lines) if line["run"] == run}
    jobs = [job for job in map(json.loads, args.jobs.read_text().splitlines()) if job["id"] not in done]
    if not jobs:
        return
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    model, versions = engine(args, run, jobs[0]), {"vllm": __import__("vllm").__version__}
    with args.out.open("a") as out:
        for job in jobs:
            if time.time() < args.deadline:
                line = {"run": run, "id": job["id"], "versions": versions, **work(model, job)}
                out.write(json.dumps(line) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
