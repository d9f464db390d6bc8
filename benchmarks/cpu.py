"""The CPU figures: prefill and decoding, bounded against the plain model, and against kvpress.

All runs of one table take turns in one process, so that a slow minute of a shared machine affects all of them; what
counts is the ratio. The baseline is transformers' own model with its fastest attention (SDPA), which reads the prompt
in one forward and computes the logits of the last token only. `make bench` runs it all and writes results/cpu.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
from conditions import conditions, timed, write
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

import msrnn
from msrnn.hf.load import bundled
from msrnn.system.memory import Peak

HERE = Path(__file__).parent
KVPRESS = HERE.parent / ".venv-kvpress" / "bin" / "python"
POLICIES = ("tova", "window+4", "h2o")
PARTS = ("prefill", "pair", "formats", "residual", "heads", "decode", "kvpress")
PROFILE = "SmolLM2-135M-Instruct-heads"


def prefill_plain(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, DynamicCache]:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return logits, cache


def prefill_bounded(model: PreTrainedModel, ids: torch.Tensor, policy: str) -> tuple[torch.Tensor, msrnn.RNNState]:
    rnn = msrnn.RNN(model, policy)
    return rnn.read(ids, rnn.start())


def seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def prefill_table(model: PreTrainedModel, ids: torch.Tensor, length: int, capacity: int, repeat: int) -> Iterator[dict]:
    calls: dict[str, Callable[[], object]] = {"plain": lambda: prefill_plain(model, ids[:length])}
    for name in POLICIES:
        calls[f"{name}:{capacity}"] = lambda name=name: prefill_bounded(model, ids[:length], f"{name}:{capacity}")
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(repeat), desc=f"reading {length}", leave=False):
        for name, call in calls.items():
            runs[name].append(seconds(call))
    for name in calls:
        yield row("prefill", name, runs[name], runs["plain"], length=length)


def pair_table(model: PreTrainedModel, ids: torch.Tensor, length: int, capacity: int, repeat: int) -> Iterator[dict]:
    """Window+4 against TOVA alone, in alternating order: a closer comparison than the table with its slower runs."""
    names = [f"tova:{capacity}", f"window+4:{capacity}"]
    runs: dict[str, list[float]] = {name: [] for name in names}
    for turn in tqdm(range(repeat), desc=f"window+4 and tova, {length}", leave=False):
        for name in names if turn % 2 else reversed(names):
            runs[name].append(seconds(lambda name=name: prefill_bounded(model, ids[:length], name)))
    yield row("pair", names[1], runs[names[1]], runs[names[0]], length=length, against=names[0])


def turns_table(
    model: PreTrainedModel, ids: torch.Tensor, what: str, names: list[str], length: int, repeat: int, tokens: int
) -> Iterator[dict]:
    """Policies against the first of them: reading, then token by token, taking turns."""
    runs: dict[str, list[float]] = {name: [] for name in names}
    states = {name: prefill_bounded(model, ids[:700], name)[1] for name in names}  # compiles
    for turn in tqdm(range(repeat), desc=f"{what}, {length}", leave=False):
        for name in names if turn % 2 else reversed(names):
            start = time.perf_counter()
            states[name] = prefill_bounded(model, ids[:length], name)[1]
            runs[name].append(time.perf_counter() - start)
    for name in names:
        yield row(f"{what} prefill", name, runs[name], runs[names[0]], length=length, against=names[0])
    steps: dict[str, list[float]] = {name: [] for name in names}
    rnns = {name: msrnn.RNN(model, name) for name in names}
    for step in tqdm(range(tokens), desc=f"{what}, decoding", leave=False):
        for name in names if step % 2 else reversed(names):
            start = time.perf_counter()
            _, states[name] = rnns[name].step(ids[length + step].view(1, 1), states[name])
            steps[name].append(time.perf_counter() - start)
    for name in names:
        yield row(f"{what} decode", name, steps[name][2:], steps[names[0]][2:], length=length, against=names[0])


def decode_table(model: PreTrainedModel, ids: torch.Tensor, length: int, capacity: int, tokens: int) -> Iterator[dict]:
    """Seconds for each of `tokens` single tokens after `length`; the policies take turns token by token."""
    _, cache = prefill_plain(model, ids[:length])
    runs: dict[str, list[float]] = {"plain": []}
    states: dict[str, tuple[msrnn.RNN, msrnn.RNNState]] = {}
    for name in (f"{name}:{capacity}" for name in POLICIES):
        rnn = msrnn.RNN(model, name)
        states[name] = rnn, rnn.read(ids[:length], rnn.start())[1]
        runs[name] = []
    for step in tqdm(range(tokens), desc=f"decoding at {length}", leave=False):
        token = ids[length + step].view(1, 1)
        runs["plain"].append(seconds(lambda token=token: plain_step(model, token, cache)))
        for name, (rnn, state) in states.items():
            start = time.perf_counter()
            _, state = rnn.step(token, state)
            runs[name].append(time.perf_counter() - start)
            states[name] = rnn, state
    for name in runs:
        yield row("decode", name, runs[name][2:], runs["plain"][2:], length=length)


@torch.no_grad()
def plain_step(model: PreTrainedModel, token: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    return model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]


def row(what: str, name: str, runs: list[float], plain: list[float], **more: object) -> dict:
    ratios = sorted(mine / theirs for mine, theirs in zip(runs, plain, strict=True))
    spread = [round(ratios[0], 3), round(ratios[-1], 3)]
    return {"what": what, "run": name, **more, **timed(runs), "ratio": round(median(ratios), 3), "ratio_spread": spread}


def continuation(model: PreTrainedModel, ids: torch.Tensor, prompt: int, tokens: int, capacity: int | None) -> dict:
    """As benchmarks/kvpress_peer.py does: read the prompt, then feed the true continuation one token at a time."""
    with Peak() as prefill_peak:
        start = time.perf_counter()
        if capacity is None:
            logits, cache = prefill_plain(model, ids[:prompt])
        else:
            rnn = msrnn.RNN(model, f"tova:{capacity}")
            logits, state = rnn.read(ids[:prompt], rnn.start())
        prefill = time.perf_counter() - start
    loss, spent = 0.0, 0.0
    with Peak() as decode_peak:
        for token in ids[prompt : prompt + tokens]:
            loss -= logits.log_softmax(-1)[0, token].item()
            start = time.perf_counter()
            if capacity is None:
                logits = plain_step(model, token.view(1, 1), cache)
            else:
                logits, state = rnn.step(token.view(1, 1), state)
            spent += time.perf_counter() - start
    return {
        "prefill_s": round(prefill, 4),
        "decode_s_per_token": round(spent / tokens, 5),
        "perplexity": round(math.exp(loss / tokens), 4),
        "held": prompt + tokens if capacity is None else state.held,
        "peak_bytes": {"prefill": prefill_peak.bytes, "decode": decode_peak.bytes},
    }


def kvpress_table(model: PreTrainedModel, ids: torch.Tensor, options: argparse.Namespace) -> Iterator[dict]:
    shared = {"prompt": options.prompt, "continuation": options.continuation, "capacity": options.capacity}
    for name, capacity in (("plain", None), (f"msrnn tova:{options.capacity}", options.capacity)):
        for _ in range(2):  # the first run is a warm-up
            gc.collect()
            measured = continuation(model, ids, options.prompt, options.continuation, capacity)
        yield {"what": "continuation", "run": name, **shared, **measured}
    if not KVPRESS.exists():
        print(f"kvpress is not measured: {KVPRESS} is missing; run `make bench`, which installs it")
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(ids.tolist(), file)
        file.flush()
        numbers = {"--prompt": options.prompt, "--continuation": options.continuation, "--capacity": options.capacity}
        command = [str(KVPRESS), str(HERE / "kvpress_peer.py"), "--model", str(bundled()), "--tokens", file.name]
        command += [
            str(part) for pair in (numbers | {"--threads": options.threads, "--repeat": 2}).items() for part in pair
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    peer = json.loads(done.stdout)
    for name in ("plain", "kvpress", "kvpress_eager_decode"):
        result = peer[name]
        yield {
            "what": "continuation",
            "run": f"{name} (in kvpress's environment)" if name == "plain" else name,
            **shared,
            "prefill_s": round(median(result["prefill_seconds"]), 4),
            "decode_s_per_token": round(median(result["decode_seconds_per_token"]), 5),
            "perplexity": round(result["perplexity"], 4),
            "held": max(result["rows_at_end"]),
            "peak_bytes": {phase: result["peak_growth"][phase]["sampled_bytes"] for phase in ("prefill", "decode")},
            "versions": peer["versions"],
        }


def show(record: dict) -> None:
    length, spent = record.get("length", record.get("prompt")), record.get("median_s", record.get("prefill_s"))
    names = ("ratio", "ratio_spread", "decode_s_per_token", "perplexity", "held")
    more = {name: record[name] for name in names if name in record}
    print(f"{record['what']:13} {length:6} {record['run']:34} {spent:9.4f} s  {more}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="prompt lengths to read")
    parser.add_argument("--capacity", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--decode-at", type=int, default=8192)
    parser.add_argument("--decode-tokens", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=4096, help="prompt of the comparison with kvpress")
    parser.add_argument("--continuation", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=[*PARTS])
    parser.add_argument("-o", "--out", type=Path, default=HERE.parent / "results" / "cpu.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = msrnn.load(dtype=torch.float32)
    model.set_attn_implementation("sdpa")  # of the baseline; bounded calls use ours
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[0]
    shared = conditions(
        model="SmolLM2-135M-Instruct", dtype="float32", threads=options.threads, text="pydoc_data.topics"
    )
    for policy in POLICIES:  # compile and warm up
        prefill_bounded(model, ids[:700], f"{policy}:64")
    tables: list[Iterator[dict]] = []
    turns = options.repeat, options.decode_tokens
    if "prefill" in options.parts:
        tables += [prefill_table(model, ids, n, options.capacity, options.repeat) for n in options.lengths]
    if "pair" in options.parts:
        tables += [pair_table(model, ids, n, options.capacity, 2 * options.repeat) for n in options.lengths]
    if "formats" in options.parts:
        names = [f"tova:{options.capacity}{kv}" for kv in ("", ",kv=int8", ",kv=k8v4")]
        tables += [turns_table(model, ids, "formats", names, n, *turns) for n in options.lengths]
    if "residual" in options.parts:
        names = [f"{policy}:{options.capacity}" for policy in ("fade", "blend")]
        tables += [turns_table(model, ids, "residual", names, n, *turns) for n in options.lengths]
    if "heads" in options.parts:
        names = [f"fade:{options.capacity}{profile}" for profile in ("", f",profile={PROFILE}")]
        tables += [turns_table(model, ids, "heads", names, n, *turns) for n in options.lengths]
    if "decode" in options.parts:
        tables += [decode_table(model, ids, options.decode_at, options.capacity, options.decode_tokens)]
    if "kvpress" in options.parts:
        tables += [kvpress_table(model, ids, options)]
    records = []
    for table in tables:
        for record in table:
            show(record)
            records.append(record | shared | record)
        write(options.out, records)
    print(f"load before {shared['load_before']}, after {os.getloadavg()[0]:.2f}; written to {options.out}")


if __name__ == "__main__":
    main()
