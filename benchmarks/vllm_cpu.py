"""Throughput inside vLLM at a fixed memory for keys and values: stock against a bounded state, in one run on this CPU.

    .venv-vllm/bin/python benchmarks/vllm_cpu.py

Every engine gets the same requests at once. At the first two memories stock vLLM has room for one and for two of them,
at the last for all: there both run the same batch. A record says tokens per second, the time to the first token, how
often vLLM preempted, and over time how many requests ran and how many tokens were written. Rows are added to
results/vllm_cpu.jsonl; `msrnn plot results/vllm_cpu.jsonl -o figures` draws them. About 10 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conditions import conditions

ROOT = Path(__file__).resolve().parent.parent
CASES = [f"{policy}@{memory}" for memory in (160, 300) for policy in ("stock", "tova:256")] + ["stock@900"]
SETTINGS = ("requests", "prompt", "new", "memory", "at_once", "budget")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="POLICY@MB: stock or a policy, at so many megabytes")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=8, help="requests that may run at once (vLLM's max-num-seqs)")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a batch, as vLLM's server has it on a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "vllm_cpu.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        policy, _, megabytes = options.one.partition("@")
        options.memory = int(megabytes) * 10**6
        print("RECORD " + json.dumps(measure(options, policy)))
        return
    options.out.parent.mkdir(exist_ok=True)
    for case in options.cases:  # an engine each, in a process of its own
        row = _alone(case)
        with options.out.open("a") as file:
            file.write(row + "\n")
        print({name: value for name, value in json.loads(row).items() if name != "over_time"}, flush=True)


def _alone(case: str) -> str:
    again = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", case], stdout=subprocess.PIPE, text=True)
    rows = [line.removeprefix("RECORD ") for line in again.stdout.splitlines() if line.startswith("RECORD ")]
    if again.returncode or not rows:
        raise SystemExit(f"{case}: the engine ended with {again.returncode}")
    return rows[0]


def measure(options: argparse.Namespace, policy: str) -> dict[str, object]:
    """One engine, all requests at once."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    if policy != "stock":
        os.environ["MSRNN_POLICY"] = policy
    import torch
    from vllm import LLM, SamplingParams

    from msrnn.hf.load import bundled
    from msrnn.vllm.plugin import vllm_version

    llm = LLM(
        str(bundled()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=options.prompt + options.new,
        max_num_seqs=options.at_once,
        max_num_batched_tokens=options.budget,
        kv_cache_memory_bytes=options.memory,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True)
    warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": list(range(100, 100 + min(600, options.prompt)))}], warm, use_tqdm=False)
    for number, ids in enumerate(_texts(options.requests, options.prompt)):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    shared = conditions(what="serving", policy=policy, model="SmolLM2-135M-Instruct", dtype="float32")
    shared |= {"vllm": vllm_version(), "threads": torch.get_num_threads()}
    return shared | {name: getattr(options, name) for name in SETTINGS} | _drive(llm.llm_engine)


def _drive(engine: Any) -> dict[str, object]:
    """Step until all is written; what was seen on the way."""
    scheduler = engine.engine_core.engine_core.scheduler
    first: dict[str, float] = {}
    written: dict[str, int] = {}
    seen: list[tuple[float, int, int]] = []
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        answers = engine.step()
        now = round(time.perf_counter() - start, 3)
        for answer in answers:
            first.setdefault(answer.request_id, now)
            written[answer.request_id] = len(answer.outputs[0].token_ids)
        seen.append((now, len(scheduler.running), sum(written.values())))
    seconds, waits = time.perf_counter() - start, sorted(first.values())
    return {
        "seconds": round(seconds, 2),
        "new_tokens_per_s": round(sum(written.values()) / seconds, 3),
        "first_token_s": {"first": waits[0], "median": waits[len(waits) // 2], "last": waits[-1]},
        "running_max": max(count for _, count, _ in seen),
        "over_time": seen[:: max(1, len(seen) // 100)] + seen[-1:],
        "preemptions": sum(each.value for each in engine.get_metrics() if each.name == "vllm:num_preemptions"),
    }


def _texts(count: int, length: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from msrnn.hf.load import bundled

    text = " ".join((ROOT / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"] * (2 + length // 1000)
    return [ids[37 * number : 37 * number + length] for number in range(count)]


if __name__ == "__main__":
    main()
