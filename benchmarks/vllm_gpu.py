"""Real vLLM on a GPU, with bounded states against stock: first tokens, throughput, decoding steps, start-up, memory.

    python benchmarks/vllm_gpu.py --minutes 9 --out results/vllm_gpu.jsonl
    python benchmarks/vllm_gpu.py --engines msrnn --loads first-96x4096 one-4096:trained --threshold 256 --out ...
    python benchmarks/vllm_gpu.py --policy tova:512,kv=int8 --kv-cache-dtype fp8 --out ...    # 8 bits in both
    python benchmarks/vllm_gpu.py --together --kv-gib 40 --loads one-65536 one-4096 first-96x4096 --out ...
    python benchmarks/vllm_gpu.py --engines msrnn --loads one-4096 --kernels serve-384x2048+1024:trained --out ...
    python benchmarks/vllm_gpu.py --max-num-seqs 1024 --loads serve-1024x512+256 --out ...
    python benchmarks/vllm_gpu.py --summary results/vllm_gpu.jsonl
    python benchmarks/vllm_gpu.py --engines stock msrnn stock msrnn --rounds 0 --out ...    # starts only
    .venv-vllm/bin/python benchmarks/vllm_gpu.py --small --minutes 2 --out /tmp/small.jsonl    # on a CPU, to try it

A model of a given shape with random weights, in three kinds: `flat`, plain random weights, whose attention is the
scan's worst case, `steady`, with query biases that make a token's weight similar from row to row, and `trained`, with
biases so strong that about as many decisions are near as in a trained model (`near_decisions.py` counts them). Every
engine runs in a process of its own, its loads in the order of their importance, round after round until its share of
the minutes is over. A record is written as soon as it is measured.
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
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from turns import own_turn
from vllm_gpu_compiled import Compilations
from vllm_gpu_engine import ROPE_THETA, STRENGTH, memory_of, set_weights, start
from vllm_gpu_kernels import kernels_of
from vllm_gpu_summary import summary

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))


class Load(NamedTuple):
    """So many requests at once with prompts of a length and so many new tokens; `target`: the ratio aimed at."""

    requests: int
    prompt: int
    new: int
    attention: str = "steady"
    target: str = ""
    long: bool = False  # measured in --long-rounds rounds only

    @property
    def name(self) -> str:
        kind = "one" if self.requests == 1 else "first" if self.new == 1 else "serve"
        size = f"{self.prompt}" if self.requests == 1 else f"{self.requests}x{self.prompt}"
        return f"{kind}-{size}" + ("" if self.new == 1 else f"+{self.new}")

    def among(self, names: list[str]) -> bool:
        """`one-4096` names loads of every kind of attention, `one-4096:flat` a single one."""
        return self.name in names or f"{self.name}:{self.attention}" in names


LOADS = [
    Load(96, 4096, 1, "steady", "time at most 1.5 x stock"),
    Load(96, 64, 1, "steady", "time at most 1.3 x stock"),
    Load(1, 4096, 1, "steady", "time at most 3 x stock"),
    Load(96, 4096, 128, "steady", "throughput at least 0.75 x stock; step at most 0.75 x"),
    Load(1, 65536, 1, "steady", "time at most 1.1 x stock"),
    Load(1, 4096, 1, "flat", "time at most 5 x stock"),
    Load(96, 1024, 64, "steady", "step at most 1 x stock"),
    Load(384, 2048, 1024, "steady", "throughput at least 2 x stock, nobody preempted", long=True),
    Load(256, 1024, 2048, "steady", "throughput at least 1.6 x stock, nobody preempted", long=True),
    Load(96, 4096, 1, "flat", "time at most 1.5 x stock", long=True),
    Load(1, 4096, 1, "trained", "time at most 3 x stock"),
    Load(1, 65536, 1, "trained", "time at most 1.1 x stock"),
    Load(96, 4096, 1, "trained", "time at most 1.5 x stock"),
    Load(384, 2048, 1024, "trained", "throughput at least 2 x stock, nobody preempted", long=True),
    Load(1024, 512, 256, long=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["msrnn", "stock"], choices=["msrnn", "stock"])
    parser.add_argument(
        "--loads", nargs="+", help="e.g. first-96x4096, one-4096:flat; default: all of at most --max-num-seqs requests"
    )
    parser.add_argument("--attention", choices=sorted(STRENGTH), help="only loads with this kind of attention")
    parser.add_argument("--shape", default="llama-3-8b", choices=["llama-3-8b", "llama-2-7b"])
    parser.add_argument("--policy", default="tova:512")
    parser.add_argument("--threshold", type=int, default=512, help="long_prefill_token_threshold with states")
    parser.add_argument("--no-lanes", action="store_true", help="a long prompt alone in one pass, not in pieces")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a batch (max_num_batched_tokens)")
    parser.add_argument("--max-model-len", type=int, default=66000)
    parser.add_argument("--utilization", type=float, help="gpu_memory_utilization, vLLM's default if not given")
    parser.add_argument("--graphs", help="cudagraph_mode, vLLM's default if not given, e.g. FULL_DECODE_ONLY")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of stock vLLM, e.g. fp8 or int8_per_token_head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9, help="of all engines together")
    parser.add_argument("--once", nargs="+", default=[], help="loads measured in the first round only")
    parser.add_argument("--long-rounds", type=int, default=1, help="rounds of the loads that take longest")
    parser.add_argument("--kernels", nargs="+", default=[], help="loads whose kernels are recorded, after all others")
    parser.add_argument("--together", action="store_true", help="start engines at once, measure one after the other")
    parser.add_argument("--kv-gib", type=float, help="GiB for keys and values of each engine, instead of what is free")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summary", type=Path, help="print what is in a file of records, and end")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.summary:
        summary(options.summary)
        return
    if options.out is None:
        parser.error("give --out FILE")
    if options.together and not (options.kv_gib or options.small):
        parser.error("--together: each engine would take the other's memory for its own; give --kv-gib for each")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.one:
        measure(options, options.one)
        return
    failed = run_together(options) if options.together else run_in_turn(options)
    summary(options.out)
    if failed:
        raise SystemExit(f"these engines failed: {', '.join(failed)}")


def run_in_turn(options: argparse.Namespace) -> list[str]:
    """One engine after the other -> those that failed."""
    return [engine for engine in options.engines if subprocess.run(_command(engine)).returncode]


def run_together(options: argparse.Namespace) -> list[str]:
    """All engines start at the same time; only one of them measures at a time -> those that failed."""
    turns = {} if "TURNS" in os.environ else {"TURNS": f"{tempfile.mkdtemp(prefix='turns-')}:{len(options.engines)}"}
    running = {engine: subprocess.Popen(_command(engine), env=os.environ | turns) for engine in options.engines}
    return [engine for engine, process in running.items() if process.wait()]


def _command(engine: str) -> list[str]:
    return [sys.executable, __file__, *sys.argv[1:], "--one", engine]


def measure(options: argparse.Namespace, engine: str) -> None:
    """One engine: start it, then the loads round after round while there is time."""
    begin = time.monotonic()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.pop("MSRNN_POLICY", None)
    if engine == "msrnn":
        os.environ["MSRNN_POLICY"] = options.policy
    shared = conditions(options, engine)
    llm, start_s, timeline = start(options, engine)
    about = shared | memory_of(llm, options) | {"start_s": round(start_s, 1)}
    write(options.out, about | {"kind": "vllm start", "timeline": timeline} | start_parts(llm))
    share = 60 * options.minutes / len(options.engines)
    with own_turn():
        measure_loads(options, engine, llm, about, share - (0 if options.together else time.monotonic() - begin))


def measure_loads(options: argparse.Namespace, engine: str, llm: Any, about: dict[str, Any], seconds: float) -> None:
    """Round after round, as long as there is time; then the kernels."""
    begin, attention, compiled = time.monotonic(), None, Compilations()
    for turn, load in rounds(options):
        if time.monotonic() - begin > seconds:
            print(f"{engine}: out of time before {load.name} of round {turn + 1}", flush=True)
            break
        if load.attention != attention:
            set_weights(llm, load.attention)
            run_load(llm, Load(2, 600, 4), seed=1)  # whatever comes first after a start
            attention, first = load.attention, {"kind": "vllm first requests", "triton_compiled": compiled.take()}
            write(options.out, about | first | {"attention": attention})
        figures = run_load(llm, load, seed=turn) | {"triton_compiled": compiled.take()}
        figures |= {"load": load.name, "attention": load.attention, "round": turn, "target": load.target}
        figures |= {"requests": load.requests, "prompt": load.prompt, "new": load.new}
        write(options.out, about | {"kind": "vllm load"} | figures)
    for load in sized(options):
        if load.among(options.kernels) and options.attention in (None, load.attention):
            if load.attention != attention:
                set_weights(llm, load.attention)
                attention = load.attention
            for found in kernels_of(llm.llm_engine, add_requests(llm.llm_engine, load, "kernels")):
                named = {"kind": "vllm kernels", "load": load.name, "attention": attention}
                write(options.out, about | named | found)


def start_parts(llm: Any) -> dict[str, Any]:
    """What the start's seconds went to, as far as it is known."""
    from msrnn.vllm import warmup

    config = llm.llm_engine.vllm_config.compilation_config
    parts = {f"warm-up: {part}": round(taken, 2) for part, taken in warmup.seconds.items()}
    return {"parts": parts | {"torch.compile": getattr(config, "compilation_time", None)}}


def rounds(options: argparse.Namespace) -> list[tuple[int, Load]]:
    """Every load once, then again in further rounds, long ones in fewer; flat attention last."""

    def count(load: Load) -> int:
        return 1 if load.among(options.once) else options.long_rounds if load.long else options.rounds

    turns = [(turn, load) for turn in range(options.rounds) for load in chosen(options) if turn < count(load)]
    return sorted(turns, key=lambda pair: ("steady", "trained", "flat").index(pair[1].attention))


def sized(options: argparse.Namespace) -> list[Load]:
    return [_small(load) for load in LOADS] if options.small else LOADS


def _small(load: Load) -> Load:
    return load._replace(requests=-(-load.requests // 16), prompt=max(8, load.prompt // 32), new=-(-load.new // 32))


def chosen(options: argparse.Namespace) -> list[Load]:
    """Those named; otherwise all whose requests may all run at once."""
    loads = [load for load in sized(options) if options.attention in (None, load.attention)]
    most = _small(Load(options.max_num_seqs, 0, 1)).requests if options.small else options.max_num_seqs
    loads = [load for load in loads if (load.among(options.loads) if options.loads else load.requests <= most)]
    if not loads:
        raise SystemExit(f"no such load; there are {', '.join(f'{one.name}:{one.attention}' for one in LOADS)}")
    return loads


def conditions(options: argparse.Namespace, engine: str) -> dict[str, Any]:
    import torch

    from msrnn.system.provenance import command, commit, machine, now, versions
    from msrnn.vllm.plugin import vllm_version

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"date": now(), "commit": options.commit or commit(), "machine": machine(device), "versions": versions()}
    about |= {"command": command(), "vllm": vllm_version(), "engine": engine}
    about |= {"policy": options.policy if engine == "msrnn" else "full", "shape": options.shape, "small": options.small}
    names = (
        "threshold",
        "no_lanes",
        "max_num_seqs",
        "budget",
        "max_model_len",
        "utilization",
        "graphs",
        "kv_cache_dtype",
        "kv_gib",
    )
    about["rope_theta"] = ROPE_THETA[options.shape]
    about |= {name: getattr(options, name) for name in names}
    return about if engine == "msrnn" else about | {"threshold": 0}


def add_requests(engine: Any, load: Load, seed: object) -> list[str]:
    """The names of a load's requests, which now wait in the engine."""
    from vllm import SamplingParams

    vocabulary, numbers = engine.model_config.get_vocab_size(), random.Random(f"{load.name} {seed}")
    sampling = SamplingParams(temperature=0, max_tokens=load.new, ignore_eos=True, detokenize=False)
    names = [f"{load.name} {seed} {number}" for number in range(load.requests)]
    for name in names:
        engine.add_request(name, {"prompt_token_ids": numbers.choices(range(3, vocabulary), k=load.prompt)}, sampling)
    return names


def run_load(llm: Any, load: Load, seed: int) -> dict[str, Any]:
    """All requests at once; seconds, tokens, waits, and the median step in which every request wrote a token."""
    import torch

    engine = llm.llm_engine
    add_requests(engine, load, seed)
    before = preemptions(engine)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    figures = drive(engine, load)
    figures["preemptions"] = preemptions(engine) - before
    if torch.cuda.is_available():
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    return figures


def drive(engine: Any, load: Load) -> dict[str, Any]:
    first: dict[str, float] = {}
    written: dict[str, int] = {}
    steps: list[float] = []
    begin = last = time.perf_counter()
    while engine.has_unfinished_requests():
        answers = engine.step()
        now = time.perf_counter()
        for answer in answers:
            first.setdefault(answer.request_id, now - begin)
            written[answer.request_id] = len(answer.outputs[0].token_ids)
        if len(answers) == load.requests and len(first) == load.requests:
            steps.append(now - last)
        last = now
    seconds, waits = last - begin, sorted(first.values())
    complete = len(written) == load.requests and set(written.values()) == {load.new}
    return {
        "seconds": round(seconds, 4),
        "new_tokens_per_s": round(sum(written.values()) / seconds, 2),
        "first_token_s": {"first": waits[0], "median": median(waits), "last": waits[-1]},
        "step_ms": round(1e3 * median(steps[1:]), 4) if len(steps) > 4 else None,
        "complete": complete,
    }


def preemptions(engine: Any) -> float:
    return float(sum(each.value for each in engine.get_metrics() if each.name == "vllm:num_preemptions"))


def write(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    shown = ("kind", "engine", "load", "attention", "seconds", "new_tokens_per_s", "step_ms", "preemptions", "complete")
    shown += ("start_s", "blocks", "info_blocks", "triton_compiled")
    print({name: record[name] for name in shown if record.get(name) is not None}, flush=True)


if __name__ == "__main__":
    main()
