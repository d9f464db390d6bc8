"""Automatic prefix reuse inside vLLM: the time to the first token where a prompt begins as an earlier one did.

    .venv-vllm/bin/python benchmarks/vllm_reuse.py                                   # SmolLM2, on a CPU
    python benchmarks/vllm_reuse.py --shape llama-3-8b --policy tova:512 --out FILE  # random weights, on a GPU

Prompts share a text and end differently. Each round has a text of its own: one request reads it, two more begin with
it; one request runs at a time. A second engine has no pool and answers the last prompt of each round: its times show
what a read costs that is not cut where states are kept. With trained weights both answers must be equal, token for
token. `--many N`: then N prompts at once that share nothing, which is what the pool costs where it finds nothing.
`--shared 2048 8160`: one length after the other in the same engines, each with a record of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from turns import own_turn
from vllm_gpu_engine import model_folder, set_weights

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
SETTINGS = ("policy", "shared", "tail", "new", "rounds", "shape", "budget", "many", "length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="tova:256")
    parser.add_argument("--shape", help="a shape with random weights in bfloat16, not the bundled model in float32")
    parser.add_argument("--shared", type=int, nargs="+", default=[2048], help="tokens that a round's prompts share")
    parser.add_argument("--tail", type=int, default=32, help="tokens of each prompt after them")
    parser.add_argument("--new", type=int, default=16, help="new tokens of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a batch")
    parser.add_argument("--many", type=int, default=0, help="prompts at once that share nothing, measured at the end")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each of these")
    parser.add_argument("--together", action="store_true", help="start both engines at once")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "vllm.jsonl")
    parser.add_argument("--one", choices=["pool", "none"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RUNS " + json.dumps(measure(options, options.one)), flush=True)
        return
    if options.together:
        os.environ.setdefault("TURNS", f"{tempfile.mkdtemp(prefix='turns-')}:2")
    with ThreadPoolExecutor(2 if options.together else 1) as engines:
        pool, none = engines.map(alone, ("pool", "none"))
    about = conditions(options)
    runs = zip(options.shared, pool, none, strict=True)
    records = [about | {"shared": shared} | compare(kept, read) for shared, kept, read in runs]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    for record in records:
        print({name: value for name, value in record.items() if name not in ("versions", "command")})
    if options.shape is None and not all(record["equal"] for record in records):
        raise SystemExit("answers differ")


def alone(kind: str) -> list[dict[str, Any]]:
    """One engine, in a process of its own: its runs for each shared length."""
    again = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", kind], stdout=subprocess.PIPE, text=True)
    lines = [line.removeprefix("RUNS ") for line in again.stdout.splitlines() if line.startswith("RUNS ")]
    if again.returncode or not lines:
        raise SystemExit(f"{again.stdout[-3000:]}\n{kind}: the engine ended with {again.returncode}")
    runs: list[dict[str, Any]] = json.loads(lines[0])
    return runs


def compare(pool: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    first = [run["seconds"] for run in pool["runs"] if run["turn"] == 0]
    again = [run["seconds"] for run in pool["runs"] if run["turn"] > 0]
    uncut = [run["seconds"] for run in none["runs"]]
    pairs = zip(pool["runs"][2::3], none["runs"], strict=True)
    return {
        "first_s": round(median(first), 4),
        "again_s": round(median(again), 4),
        "without_pool_s": round(median(uncut), 4),
        "times_sooner": round(median(first) / median(again), 2),
        "times_sooner_than_without": round(median(uncut) / median(again), 2),
        "runs_s": {"first": first, "again": again, "without_pool": uncut},
        "many_s": {"pool": pool["many"], "without_pool": none["many"]},
        "tokens_reused": pool["hits"],
        "equal": all(one["tokens"] == two["tokens"] for one, two in pairs),
    }


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from msrnn.system.provenance import command, commit, machine, now, versions
    from msrnn.vllm.plugin import vllm_version

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"date": now(), "commit": options.commit or commit(), "machine": machine(device), "versions": versions()}
    about |= {"command": command(), "load_before": round(os.getloadavg()[0], 2), "what": "prefix reuse"}
    return about | {"vllm": vllm_version()} | {name: getattr(options, name) for name in SETTINGS}


def measure(options: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """The time to the first token and the tokens of every request, one after the other, for each shared length."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", MSRNN_POLICY=options.policy)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    from msrnn.vllm.lane_count import WORKER
    from msrnn.vllm.pool import SCHEDULER, STATES
    from msrnn.vllm.prefix import CONNECTOR

    places = {STATES: 16 * options.rounds * len(options.shared)}
    transfer = CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": places}
    pool = {"kv_transfer_config": transfer, "scheduler_cls": SCHEDULER} if kind == "pool" else {}
    llm = LLM(**settings(options), **pool, worker_cls=WORKER)
    if options.shape is not None:
        set_weights(llm, "steady")
    with own_turn():
        found = [runs_of(llm, options, shared, kind) for shared in options.shared]
        at_once = [many(llm.llm_engine, options, turn) for turn in range(-1, 3)][1:]
    return [runs | {"many": at_once} for runs in found]


def runs_of(llm: Any, options: argparse.Namespace, shared: int, kind: str) -> dict[str, Any]:
    runs, before = [], hits_of(llm)
    for turn in range(-1, options.rounds):  # the first round is a warm-up
        for number, prompt in list(enumerate(prompts(options, shared, turn)))[0 if kind == "pool" else -1 :]:
            seconds, tokens = answer(llm.llm_engine, prompt, options.new)
            if turn >= 0:
                runs.append({"turn": number, "seconds": round(seconds, 4), "tokens": tokens})
    return {"runs": runs, "hits": hits_of(llm) - before}


def hits_of(llm: Any) -> float:
    """Tokens that requests did not have to read so far."""
    metrics = llm.get_metrics()
    return float(sum(metric.value for metric in metrics if metric.name == "vllm:external_prefix_cache_hits"))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    from msrnn.hf.load import bundled

    length = max(max(options.shared) + options.tail + options.new, options.length + 1 if options.many else 0)
    common = {"max_model_len": length, "max_num_batched_tokens": options.budget, "max_num_seqs": max(16, options.many)}
    common |= {"disable_log_stats": False, "enable_prefix_caching": False}
    common |= {"long_prefill_token_threshold": 512, "long_prefill_token_threshold_adaptive": True}  # as msrnn serve
    if options.shape is None:
        return common | {"model": str(bundled()), "dtype": "float32", "enforce_eager": True} | _memory()
    sizes = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    common |= {"model": model_folder(options.shape), "load_format": "dummy", "skip_tokenizer_init": True}
    return common | {"dtype": "bfloat16", "compilation_config": sizes} | _memory(8, 0.05)


def _memory(gib: int = 2, share: float = 0.25) -> dict[str, float]:
    """`share`: of the device's memory, which must be free at the start."""
    return {"kv_cache_memory_bytes": gib << 30, "gpu_memory_utilization": share}


def prompts(options: argparse.Namespace, length: int, turn: int) -> list[list[int]]:
    """Three prompts with the same beginning; every round has a beginning of its own."""
    sizes = [length, *[options.tail] * 3]
    generator = random.Random(f"round {turn} {length}")  # of text: -1 and 1 as numbers are the same seed
    if options.shape is not None:
        shared, *tails = ([generator.randrange(1000, 9000) for _ in range(size)] for size in sizes)
        return [shared + tail for tail in tails]
    from transformers import AutoTokenizer

    from msrnn.hf.load import bundled

    text = " ".join((ROOT / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"] * (2 + length // 1000)
    starts = generator.sample(range(1000), 4)
    shared, *tails = (ids[start : start + size] for start, size in zip(starts, sizes, strict=True))
    return [shared + tail for tail in tails]


def answer(engine: Any, prompt: list[int], new: int) -> tuple[float, list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    start, seconds, tokens = time.perf_counter(), 0.0, []
    engine.add_request(f"{start}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            seconds = seconds or time.perf_counter() - start
    return seconds, tokens


def many(engine: Any, options: argparse.Namespace, turn: int) -> float | None:
    """Seconds until each of many prompts that share nothing has its first token."""
    from vllm import SamplingParams

    if not options.many:
        return None
    generator, sampling = random.Random(f"many {turn}"), SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for number in range(options.many):
        prompt = [generator.randrange(1000, 9000) for _ in range(options.length)]
        engine.add_request(f"many {turn} {number}", {"prompt_token_ids": prompt}, sampling)
    start = time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
    return round(time.perf_counter() - start, 4)


if __name__ == "__main__":
    main()
