"""Is real vLLM with bounded states right on this machine? SmolLM2 in float32, CUDA graphs on where there is a GPU.

    python benchmarks/vllm_agrees.py --out results/vllm_agrees.jsonl
    python benchmarks/vllm_agrees.py --jobs 4 --out results/vllm_agrees.jsonl    # four engines at once, on a GPU
    python benchmarks/vllm_agrees.py --policies tova:64,kv=int8 best:64 --eager --out /tmp/agrees.jsonl

A capacity above the length must give the tokens of stock vLLM and those of plain transformers; every other policy, and
plans with a policy for each layer or KV head, those of the transformers path, one text at a time. Prompts of unequal
length run together, in pieces, and once more with all requests preempted twice on the way, and a third time from the
states that the others left in the pool. `--alone`: long prompts, one after the other, whose pieces go through the model
side by side. An engine each, in a process of its own; the exit code says if all agree. Where
tokens differ, the record has the margin at that token: how far apart the two best log-probabilities are, on both sides.

Slots of codes (`kv=`, `best`) are reported, not required: where two paths round a key differently, it may get another
code, and log-probabilities change by a tenth or more (so they do on one path whose prompt is cut in other pieces).

Stock's attention kernel for float32 multiplies in TF32 on a GPU (Triton's default for `tl.dot`), with 10 bits of
mantissa. `stock` runs it in float32 (TRITON_F32_DEFAULT=ieee), `stock tf32` as it comes: reported, not required.
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
POLICIES = ("tova:64", "h2o:64", "window+4:64", "fade:64", "blend:64", "profile", "by head")
POLICIES += ("tova:256", "h2o:256", "window+4:256", "fade:256")
KINDS = ("tova:{}", "tova-head:{}", "tova-query-head:{}", "tova+2:{},last=4,momentum=0.5", "fade:{}", "h2o:{}")
KINDS += ("h2o-layer+1:{}", "window:{}", "window+4:{}", "tova:{},gain=value_norm", "h2o:{},gain=value_norm")
LENGTHS = ((0, 5), (100, 40), (300, 1), (500, 130), (700, 330), (40, 64), (900, 65), (1100, 257), (200, 600), (350, 17))
LONG = ((0, 2200), (150, 1500), (700, 1300))  # one after the other, in pieces that run beside each other
CONDITIONS = ("eager", "no_compile", "threshold", "budget", "new", "jobs", "states", "alone")
ROOMY = {False: "tova:800", True: "tova:3000"}  # more than any text here has; True: --alone
STOCK = ("stock", "stock tf32")
Answers = dict[str, list[list[Any]]]  # by run: for every prompt its new tokens, or their margins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", help="default: many, and one with more slots than any text has tokens")
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and torch.compile: starts faster")
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs without torch.compile: starts faster")
    parser.add_argument("--threshold", type=int, default=64, help="long_prefill_token_threshold")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a batch")
    parser.add_argument("--states", type=int, default=64, help="places of the pool of earlier prompts' states; 0: none")
    parser.add_argument("--alone", action="store_true", help="long prompts, one at a time, each in pieces side by side")
    parser.add_argument("--jobs", type=int, default=1, help="engines at once; several fit on a GPU")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.policies = options.policies or [ROOMY[options.alone], *POLICIES]
    if options.one:
        print("TOKENS " + json.dumps(inside(options, options.one)), flush=True)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as engines:
        roomy = [policy for policy in options.policies if policy in ROOMY.values()]
        names = [*(STOCK if roomy else ()), *options.policies]
        runs = {name: engines.submit(alone_in_process, options, name) for name in names}
        for policy, reference in comparisons(options.policies, roomy):
            expected = runs[reference].result() if reference in STOCK else outside(options, policy, reference)
            record = compare(policy, runs[policy].result(), reference, expected)
            record["seconds"] = round(time.monotonic() - begin, 1)
            with options.out.open("a") as file:
                file.write(json.dumps(conditions(options) | record) + "\n")
            print({name: record[name] for name in ("policy", "reference", "right", "differ", "seconds")}, flush=True)
            if record["required"] and not record["right"]:
                failed.append(f"{policy} against {reference}")
    if failed:
        raise SystemExit(f"wrong: {', '.join(failed)}")


def comparisons(policies: list[str], roomy: list[str]) -> list[tuple[str, str]]:
    """Which engine is compared with what: `transformers` is the plain model, `msrnn` its path with the same policy."""
    pairs = [(policy, "msrnn") for policy in policies if policy not in roomy]
    for each in roomy:
        pairs = [(name, "transformers") for name in (each, *STOCK)] + [(each, name) for name in STOCK] + pairs
    return pairs


def compare(policy: str, ours: dict[str, Any], reference: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Where the tokens of any run differ from the expected ones, with the margins there."""
    differ: dict[str, Any] = {}
    tokens, margins = (next(iter(expected[part].values())) for part in ("tokens", "margins"))
    for run, answers in ours["tokens"].items():
        for number, pair in enumerate(zip(answers, tokens, strict=True)):
            if pair[0] != pair[1]:
                at = _first_difference(*pair)
                both = {"margin": ours["margins"][run][number][at], "expected_margin": margins[number][at]}
                differ.setdefault(run, {})[number] = {"at": at} | both
    required = "stock tf32" not in (policy, reference) and not ("kv=" in policy or "best" in policy)
    record = {"kind": "vllm agrees", "policy": policy, "reference": reference, "required": required}
    return record | {"right": not differ, "differ": differ, "engine": ours["about"], "expected": expected["about"]}


def _first_difference(ours: list[int], theirs: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours) - 1)


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from msrnn.system.provenance import command, commit, machine, now, versions
    from msrnn.vllm.plugin import vllm_version

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"date": now(), "commit": options.commit or commit(), "machine": machine(device), "versions": versions()}
    about |= {"command": command(), "vllm": vllm_version(), "model": "SmolLM2-135M-Instruct", "dtype": "float32"}
    return about | {name: getattr(options, name) for name in CONDITIONS}


def alone_in_process(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Tokens and margins of one engine."""
    precision = {"TRITON_F32_DEFAULT": "ieee"} if policy == "stock" else {}
    again = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", policy],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | precision,
    )
    lines = [line.removeprefix("TOKENS ") for line in again.stdout.splitlines() if line.startswith("TOKENS ")]
    if again.returncode or not lines:
        print(again.stdout[-3000:])
        raise SystemExit(f"{policy}: the engine ended with {again.returncode}")
    answers: dict[str, Any] = json.loads(lines[0])
    return answers


def plan_text(policy: str) -> str:
    """`profile` and `by head` are plans: a kind and a capacity for every layer, or a capacity for every KV head."""
    if policy == "by head":
        return ";".join(f"fade:{24 + 4 * (layer % 7)}|h2o:64|fade:{104 - 4 * (layer % 7)}" for layer in range(30))
    if policy != "profile":
        return policy
    return ";".join(KINDS[layer % len(KINDS)].format(24 + 4 * (layer % 7)) for layer in range(30))


def prompts(alone: bool) -> list[list[int]]:
    from transformers import AutoTokenizer

    from msrnn.hf.load import bundled

    text = " ".join((ROOT / "LICENSE").read_text().split())
    ids = AutoTokenizer.from_pretrained(bundled())(text)["input_ids"]
    return [ids[start : start + length] for start, length in (LONG if alone else LENGTHS)]


def inside(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Tokens and margins of one engine: all prompts together, with everybody preempted twice, and from states."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.pop("MSRNN_POLICY", None)
    if policy not in STOCK:
        os.environ["MSRNN_POLICY"] = plan_text(policy)
    from vllm import LLM

    from msrnn.hf.load import bundled

    batches = count_pieces()
    llm = LLM(str(bundled()), **settings_of(options, policy))
    engine = llm.llm_engine
    batches.clear()  # vLLM's memory profile had some
    texts, ask = prompts(options.alone), one_by_one if options.alone else answers_of
    runs = {"alone" if options.alone else "together": ask(engine, options.new, (), texts)}
    if options.alone and policy not in STOCK and len(batches) < len(LONG) and ";" not in plan_text(policy):
        raise SystemExit(f"only {len(batches)} prompts were read in pieces")
    if policy not in STOCK and not options.alone:
        runs["preempted"] = ask(engine, options.new, (4, 12), texts)
    if policy not in STOCK and options.states:
        before = hits(llm)
        runs["from states"] = ask(engine, options.new, (), texts, afresh=False)
        if hits(llm) - before < 1000:
            raise SystemExit(f"only {hits(llm) - before} tokens came from the pool")
    parts = {name: {run: pair[part] for run, pair in runs.items()} for part, name in enumerate(("tokens", "margins"))}
    return parts | {"about": about_engine(engine)}


def count_pieces() -> list[int]:
    """From now on, the number of pieces of every batch that is read in some."""
    from msrnn.vllm.lanes import Streams

    counts: list[int] = []
    run = Streams.run

    def counting(self: Any, calls: list[Any]) -> list[Any]:
        counts.append(len(calls))
        return run(self, calls)

    Streams.run = counting  # type: ignore[method-assign]
    return counts


def settings_of(options: argparse.Namespace, policy: str) -> dict[str, Any]:
    """vLLM's settings; several engines fit on one GPU."""
    from msrnn.vllm.lane_count import WORKER
    from msrnn.vllm.pool import EVERY, SCHEDULER, STATES
    from msrnn.vllm.prefix import CONNECTOR

    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 4096 if options.alone else 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": options.budget,
        "long_prefill_token_threshold": 0 if policy in STOCK else options.threshold,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        "enforce_eager": options.eager,
        "gpu_memory_utilization": 0.05,
    }
    if not options.eager:
        graphs: dict[str, Any] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if options.no_compile else {}
        settings["compilation_config"] = graphs
    if policy not in STOCK:
        settings["worker_cls"] = WORKER
    if options.alone:
        settings |= {"max_num_batched_tokens": 4096, "long_prefill_token_threshold": 0}
    if policy not in STOCK and options.states:
        pool = {STATES: options.states, EVERY: 512 if options.alone else options.threshold}
        settings["kv_transfer_config"] = CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": pool}
        settings |= {"scheduler_cls": SCHEDULER, "disable_log_stats": False}
    return settings


def about_engine(engine: Any) -> dict[str, Any]:
    """Which attention runs, how float32 matmuls are done, and whether batches are scheduled ahead."""
    config = engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    about = {"attention": sorted(backends), "async_scheduling": config.scheduler_config.async_scheduling}
    return about | {"graphs": str(config.compilation_config.cudagraph_mode)} | precision()


def precision() -> dict[str, Any]:
    import torch

    matmul = torch.backends.cuda.matmul.allow_tf32
    return {"matmul": torch.get_float32_matmul_precision(), "allow_tf32": matmul, "tl.dot": _triton_default()}


def _triton_default() -> str:
    return os.environ.get("TRITON_F32_DEFAULT", "tf32 on a GPU")


def hits(llm: Any) -> int:
    """Tokens that requests did not have to read."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


def answers_of(
    engine: Any, new: int, preempt: tuple[int, ...], texts: list[list[int]], afresh: bool = True
) -> tuple[Any, Any]:
    """The greedy tokens after each prompt, and their margins; before steps in `preempt` every request loses its block.

    afresh: all is read, also what is in the pool.
    """
    from vllm import SamplingParams

    kinds = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "skip_reading_prefix_cache": afresh}
    sampling = SamplingParams(**kinds, logprobs=2)
    for number, ids in enumerate(texts):
        engine.add_request(f"{number} {time.monotonic()}", {"prompt_token_ids": ids}, sampling)
    outputs: dict[int, Any] = {}
    turn = 0
    while engine.has_unfinished_requests():
        for answer in engine.step():
            outputs[int(answer.request_id.split()[0])] = answer.outputs[0]
        turn += 1
        if turn in preempt:
            engine.reset_prefix_cache(reset_running_requests=True)
    ordered = [outputs[number] for number in range(len(texts))]
    return [list(one.token_ids) for one in ordered], [[_margin(best) for best in one.logprobs] for one in ordered]


def one_by_one(engine: Any, new: int, preempt: tuple[int, ...], texts: list[list[int]], afresh: bool = True) -> Any:
    """The same, each prompt alone in the engine."""
    pairs = [answers_of(engine, new, preempt, [ids], afresh) for ids in texts]
    return tuple([pair[part][0] for pair in pairs] for part in (0, 1))


def _margin(best: dict[int, Any]) -> float:
    """Between the two best of a token's log-probabilities."""
    first, second = sorted((each.logprob for each in best.values()), reverse=True)[:2]
    return float(first - second)


_hf: list[Any] = []


def outside(options: argparse.Namespace, policy: str, reference: str) -> dict[str, Any]:
    """Tokens and margins of the transformers path, one text after the other; `transformers`: of the plain model."""
    import torch

    import msrnn
    from msrnn.hf.load import bundled
    from msrnn.plan import Plan, parse_layer_policy

    if not _hf:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _hf.append(msrnn.load(str(bundled()), dtype="float32")[0].to(device))
        _hf[0].generation_config.eos_token_id = None  # vLLM is told to go on, too, and may choose that token
    model = _hf[0]
    plan = None
    if reference == "msrnn":
        first, *more = plan_text(policy).split(";")
        plan = Plan(tuple(parse_layer_policy(part) for part in (first, *more))) if more else first
    tokens, margins = [], []
    for ids in prompts(options.alone):
        inputs = torch.tensor([ids], device=model.device)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            **({} if plan is None else {"past_key_values": msrnn.cache(model, plan)}),
            max_new_tokens=options.new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens.append(output.sequences[0, len(ids) :].tolist())
        best = torch.stack(output.logits)[:, 0].topk(2).values
        margins.append((best[:, 0] - best[:, 1]).tolist())
    about = precision() | {"attention": model.config._attn_implementation}
    return {"tokens": {"together": tokens}, "margins": {"together": margins}, "about": about}


if __name__ == "__main__":
    main()
