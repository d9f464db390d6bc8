"""How far rounding alone carries: the same prompts read whole and in pieces, by the transformers path, in float32.

    PYTHONPATH=src python benchmarks/rounding.py --out results/rounding.jsonl

By definition the pieces change nothing, and in float64 they do not (`--dtype float64`). In float32 a matmul of other
rows rounds in another way. Plain slots carry that on as it is. A number on its way to a code may fall on the other side
of a half, and then differs by a whole step. For each policy: the largest change of a log-probability after the prompt,
over the vocabulary and over the likely tokens (of 1 % or more), and how many texts keep all their greedy tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from vllm_agrees import prompts

import msrnn
from msrnn.system.provenance import command, commit, machine, now, versions

POLICIES = ("fade:64", "tova:64,kv=int8", "fade:64,kv=k8v4", "best:64")
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--piece", type=int, default=50, help="tokens of a piece")
    parser.add_argument("--new", type=int, default=24, help="greedy tokens after each prompt")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "rounding.jsonl")
    options = parser.parse_args()
    model = msrnn.load(dtype="float32")[0].to(getattr(torch, options.dtype))
    if options.dtype == "float64":
        LlamaRMSNorm.forward = normalise  # transformers' own rounds to float32
    for policy in options.policies:
        record = conditions(options) | {"policy": policy} | compare(model, policy, options)
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print({name: record[name] for name in ("policy", "equal", "texts", "largest_change", "likely_change")})


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    about = {"date": now(), "commit": commit(), "machine": machine(torch.device("cpu")), "versions": versions()}
    about |= {"command": command(), "model": "SmolLM2-135M-Instruct", "dtype": options.dtype}
    return about | {"piece": options.piece, "new": options.new}


def normalise(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * scaled


def compare(model: Any, policy: str, options: argparse.Namespace) -> dict[str, Any]:
    equal, largest, likely = 0, 0.0, 0.0
    texts = [ids for ids in prompts(alone=False) if len(ids) > options.piece]
    for ids in texts:
        whole, ours = read(model, policy, ids, len(ids), options.new)
        pieces, theirs = read(model, policy, ids, options.piece, options.new)
        equal += ours == theirs
        change = (whole - pieces).abs()
        largest, likely = max(largest, float(change.max())), max(likely, float(change[whole.exp() >= 0.01].max()))
    return {"texts": len(texts), "equal": equal, "largest_change": largest, "likely_change": likely}


@torch.no_grad()
def read(model: Any, policy: str, ids: list[int], piece: int, new: int) -> tuple[torch.Tensor, list[int]]:
    """The log-probabilities after the prompt, and the greedy tokens."""
    cache = msrnn.cache(model, policy)
    for part in torch.tensor([ids]).split(piece, 1):
        output = model(part, past_key_values=cache)
    first, tokens = output.logits[0, -1].double().log_softmax(-1), []
    for _ in range(new):
        tokens.append(int(output.logits[0, -1].argmax()))
        output = model(torch.tensor([tokens[-1:]]), past_key_values=cache)
    return first, tokens


if __name__ == "__main__":
    main()
