"""Throughput inside vLLM at a fixed memory for keys and values: stock against a bounded state, in one run on this CPU.

    .venv-vllm/bin/python benchmarks/vllm_cpu.py --policies stock tova:256 --requests 8 --memory 200000000

Every engine gets the same requests at once and the same memory. A record says tokens per second, the time to the first
token, how often vLLM preempted, and how many requests ran at once over time. Rows are added to results/vllm_cpu.jsonl.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["stock", "tova:256"])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--memory", type=int, default=250_000_000, help="bytes for keys and values")
    parser.add_argument("--at-once", type=int, default=256, help="requests that may run at once (vLLM's max-num-seqs)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "vllm_cpu.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print("RECORD " + json.dumps(measure(given)))
        return
    for policy in given.policies:  # an engine each, in a process of its own
        again = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", policy], stdout=subprocess.PIPE, text=True
        )
        rows = [line.removeprefix("RECORD ") for line in again.stdout.splitlines() if line.startswith("RECORD ")]
        if again.returncode or not rows:
            raise SystemExit(f"{policy}: the engine ended with {again.returncode}")
        given.out.parent.mkdir(exist_ok=True)
        with given.out.open("a") as file:
            file.write(rows[0] + "\n")
        print(rows[0], flush=True)


def measure(given: argparse.Namespace) -> dict[str, object]:
    """One engine, all requests at once."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    if given.one != "stock":
        os.environ["MSRNN_POLICY"] = given.one
    from vllm import LLM, SamplingParams

    from msrnn.models import bundled

    llm = LLM(
        str(bundled()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=given.prompt + given.new,
        max_num_seqs=given.at_once,
        kv_cache_memory_bytes=given.memory,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    engine = llm.llm_engine
    llm.generate([{"prompt_token_ids": list(range(100, 200))}], SamplingParams(max_tokens=2), use_tqdm=False)  # warm
    asked = SamplingParams(temperature=0, max_tokens=given.new, ignore_eos=True)
    for number, ids in enumerate(_texts(given.requests, given.prompt)):
        engine.add_request(str(number), {"prompt_token_ids": ids}, asked)
    shared = conditions(policy=given.one, vllm=_version(), threads=os.environ.get("OMP_NUM_THREADS"))
    return (
        shared
        | _drive(engine)
        | {name: getattr(given, name) for name in ("requests", "prompt", "new", "memory", "at_once")}
    )


def _drive(engine: Any) -> dict[str, object]:
    """Step until all is written; what was seen on the way."""
    scheduler = engine.engine_core.engine_core.scheduler
    start, first, running, tokens = time.perf_counter(), {}, [], 0
    while engine.has_unfinished_requests():
        answers = engine.step()
        now = round(time.perf_counter() - start, 3)
        running.append((now, len(scheduler.running)))
        for answer in answers:
            first.setdefault(answer.request_id, now)
            if answer.finished:
                tokens += len(answer.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    waits = sorted(first.values())
    return {
        "seconds": round(seconds, 2),
        "new_tokens_per_s": round(tokens / seconds, 3),
        "first_token_s": {"first": waits[0], "median": waits[len(waits) // 2], "last": waits[-1]},
        "running_max": max(count for _, count in running),
        "running": running[:: max(1, len(running) // 100)],
        "preemptions": sum(each.value for each in engine.get_metrics() if each.name == "vllm:num_preemptions"),
    }


def _texts(count: int, length: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from msrnn.models import bundled

    text = " ".join((ROOT / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"] * (2 + length // 1000)
    return [ids[37 * number : 37 * number + length] for number in range(count)]


def _version() -> str:
    from msrnn.adapters.vllm.plugin import vllm_version

    return vllm_version()


if __name__ == "__main__":
    main()
