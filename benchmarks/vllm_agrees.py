"""Is real vLLM with bounded states right on this machine? SmolLM2 in float32, CUDA graphs on where there is a GPU.

    python benchmarks/vllm_agrees.py --out results/vllm_agrees.jsonl
    python benchmarks/vllm_agrees.py --jobs 4 --out results/vllm_agrees.jsonl    # four engines at once, on a GPU
    python benchmarks/vllm_agrees.py --policies tova:64 h2o:64 --eager --out /tmp/agrees.jsonl

A capacity above the length must give stock vLLM's tokens; every other policy, and a plan with a policy for each layer,
those of the transformers path, one text at a time. Prompts of unequal length run together, in pieces, and once more
with all requests preempted twice on the way, and a third time from the states that the others left in the pool. An
engine each, in a process of its own; the exit code says if all agree.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
POLICIES = ("tova:64", "h2o:64", "window+4:64", "fade:64", "profile", "tova:256", "h2o:256", "window+4:256", "fade:256")
KINDS = ("tova:{}", "tova-head:{}", "tova-query-head:{}", "tova+2:{},last=4,momentum=0.5", "fade:{}", "h2o:{}")
KINDS += ("h2o-layer+1:{}", "window:{}", "window+4:{}", "tova:{},gain=value_norm", "h2o:{},gain=value_norm")
LENGTHS = ((0, 5), (100, 40), (300, 1), (500, 130), (700, 330), (40, 64), (900, 65), (1100, 257), (200, 600), (350, 17))
ROOMY = "tova:800"  # more than any text here has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=[ROOMY, *POLICIES])
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile: starts faster")
    parser.add_argument("--threshold", type=int, default=64, help="long_prefill_token_threshold")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a batch")
    parser.add_argument("--states", type=int, default=64, help="places of the pool of earlier prompts' states; 0: none")
    parser.add_argument("--jobs", type=int, default=1, help="engines at once; several fit on a GPU")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("TOKENS " + json.dumps(inside(options, options.one)), flush=True)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as engines:
        names = [*(["stock"] if ROOMY in options.policies else []), *options.policies]
        runs = {name: engines.submit(alone_in_process, options, name) for name in names}
        for policy in options.policies:
            expected = None if policy == ROOMY else outside(options, policy)
            theirs = runs[policy].result()
            expected = runs["stock"].result()["together"] if policy == ROOMY else expected
            record = compare(policy, theirs, expected) | {"seconds": round(time.monotonic() - begin, 1)}
            with options.out.open("a") as file:
                file.write(json.dumps(conditions(options) | record) + "\n")
            print(record, flush=True)
            if not record["right"]:
                failed.append(policy)
    if failed:
        raise SystemExit(f"wrong: {', '.join(failed)}")


def compare(policy: str, theirs: dict[str, list[list[int]]], expected: list[list[int]] | None) -> dict[str, Any]:
    differ = {}
    for run, answers in theirs.items():
        pairs = enumerate(zip(answers, expected or [], strict=True))
        first = {number: _first_difference(*pair) for number, pair in pairs if pair[0] != pair[1]}
        if first:
            differ[run] = first
    return {"kind": "vllm agrees", "policy": policy, "right": expected is not None and not differ, "differ": differ}


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from msrnn.system.provenance import command, commit, machine, now, versions
    from msrnn.vllm.plugin import vllm_version

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"date": now(), "commit": options.commit or commit(), "machine": machine(device), "versions": versions()}
    about |= {"command": command(), "vllm": vllm_version(), "model": "SmolLM2-135M-Instruct", "dtype": "float32"}
    return about | {name: getattr(options, name) for name in ("eager", "threshold", "budget", "new", "jobs", "states")}


def alone_in_process(options: argparse.Namespace, policy: str) -> dict[str, list[list[int]]]:
    again = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", policy], stdout=subprocess.PIPE, text=True
    )
    lines = [line.removeprefix("TOKENS ") for line in again.stdout.splitlines() if line.startswith("TOKENS ")]
    if again.returncode or not lines:
        print(again.stdout[-3000:])
        raise SystemExit(f"{policy}: the engine ended with {again.returncode}")
    answers: dict[str, list[list[int]]] = json.loads(lines[0])
    return answers


def plan_text(policy: str) -> str:
    """`profile` is a plan: every layer has a kind and a capacity of its own."""
    if policy != "profile":
        return policy
    return ";".join(KINDS[layer % len(KINDS)].format(24 + 4 * (layer % 7)) for layer in range(30))


def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    from msrnn.hf.load import bundled

    text = " ".join((ROOT / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"]
    return [ids[start : start + length] for start, length in LENGTHS]


def inside(options: argparse.Namespace, policy: str) -> dict[str, list[list[int]]]:
    """The tokens of one engine: all prompts together, and again with everybody preempted twice."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.pop("MSRNN_POLICY", None)
    if policy != "stock":
        os.environ["MSRNN_POLICY"] = plan_text(policy)
    from vllm import LLM

    from msrnn.hf.load import bundled
    from msrnn.vllm.pool import EVERY, SCHEDULER, STATES
    from msrnn.vllm.prefix import CONNECTOR

    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": options.budget,
        "long_prefill_token_threshold": 0 if policy == "stock" else options.threshold,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        "enforce_eager": options.eager,
        "gpu_memory_utilization": 0.8 / options.jobs,
    }
    if not options.eager:
        settings["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    if policy != "stock" and options.states:
        pool = {STATES: options.states, EVERY: options.threshold}
        settings["kv_transfer_config"] = CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": pool}
        settings |= {"scheduler_cls": SCHEDULER, "disable_log_stats": False}
    llm = LLM(str(bundled()), **settings)
    engine = llm.llm_engine
    runs = {"together": tokens(engine, options.new, ())}
    if policy != "stock":
        runs["preempted"] = tokens(engine, options.new, (4, 12))
    if "kv_transfer_config" in settings:
        before = hits(llm)
        runs["from states"] = tokens(engine, options.new, (), afresh=False)
        if hits(llm) - before < 1000:
            raise SystemExit(f"only {hits(llm) - before} tokens came from the pool")
    return runs


def hits(llm: Any) -> int:
    """Tokens that requests did not have to read."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


def tokens(engine: Any, new: int, preempt: tuple[int, ...], afresh: bool = True) -> list[list[int]]:
    """The greedy tokens after each prompt; before the steps in `preempt` every request loses its block.

    afresh: all is read, also what is in the pool.
    """
    from vllm import SamplingParams

    kinds = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "skip_reading_prefix_cache": afresh}
    sampling, texts = SamplingParams(**kinds), prompts()
    for number, ids in enumerate(texts):
        engine.add_request(f"{number} {time.monotonic()}", {"prompt_token_ids": ids}, sampling)
    answers: dict[int, list[int]] = {}
    turn = 0
    while engine.has_unfinished_requests():
        for answer in engine.step():
            answers[int(answer.request_id.split()[0])] = list(answer.outputs[0].token_ids)
        turn += 1
        if turn in preempt:
            engine.reset_prefix_cache(reset_running_requests=True)
    return [answers[number] for number in range(len(texts))]


_hf: list[Any] = []


def outside(options: argparse.Namespace, policy: str) -> list[list[int]]:
    """The tokens of the transformers path, one text after the other."""
    import torch

    import msrnn
    from msrnn.hf.load import bundled
    from msrnn.policy import Plan, parse_policy

    if not _hf:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _hf.append(msrnn.load(str(bundled()), dtype="float32")[0].to(device))
    model, (first, *more) = _hf[0], [parse_policy(part) for part in plan_text(policy).split(";")]
    plan = Plan((first, *more)) if more else first
    answers = []
    for ids in prompts():
        inputs = torch.tensor([ids], device=model.device)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            past_key_values=msrnn.cache(model, plan),
            max_new_tokens=options.new,
            min_new_tokens=options.new,
            do_sample=False,
        )
        answers.append(output[0, len(ids) :].tolist())
    return answers


if __name__ == "__main__":
    main()
