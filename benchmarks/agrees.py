"""Does a GPU give the CPU's results with a real model? Greedy text and PG-19 perplexity, in float32.

    python benchmarks/agrees.py expect --data DATA -o expected.json            on a CPU: texts and perplexities
    python benchmarks/agrees.py check expected.json -o results/agrees.jsonl    on a GPU: the same again, compared

At a capacity above the length nothing is evicted, so `generate` must write the plain model's text, token for token; the
engine, with its CUDA graphs, too. Perplexities must agree to 0.1 %. Exit code 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch

import msrnn
from msrnn.engine.engine import Engine
from msrnn.eval.perplexity import token_nll
from msrnn.system import provenance

POLICIES = ("full", "tova:256", "h2o:256", "window+4:256", "h2o:256,gain=value_norm")
ABOVE = "tova:2048"  # more than any prompt and its text
NEW, WITHIN = 64, 0.001


def prompts(tokenizer: Any, book: str) -> list[list[int]]:
    starts = ["Once upon a time", "The three laws of robotics are", "Write one sentence about the sea."]
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    texts = [*starts, tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True), book[:4000]]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def expect(data: Path, length: int) -> dict[str, Any]:
    """The CPU's results: the plain model's greedy text, and nats per token of a chunk of each of two books."""
    model, tokenizer = msrnn.load(dtype="float32", device="cpu")
    books = sorted(data.glob("pg19/*.txt"))[:2]
    texts = [book.read_text(encoding="utf-8") for book in books]
    inputs = prompts(tokenizer, texts[0])
    written = [_greedy(model, prompt, None) for prompt in inputs]
    starts = [tokenizer(text[: 8 * length], add_special_tokens=False)["input_ids"][:length] for text in texts]
    chunks = torch.tensor(starts)
    return {
        "machine": provenance.machine(model.device),
        "prompts": inputs,
        "written": written,
        "books": [book.stem for book in books],
        "chunks": chunks.tolist(),
        "nats": {policy: _nats(model, chunks, policy) for policy in POLICIES},
    }


def _greedy(model: Any, prompt: list[int], policy: str | None) -> list[int]:
    cache = {} if policy is None else {"past_key_values": msrnn.cache(model, policy)}
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, temperature=None, top_p=None,
        **cache,
    )  # fmt: skip
    return [int(token) for token in output[0, ids.shape[1] :]]


def _nats(model: Any, chunks: torch.Tensor, policy: str) -> float:
    """Per token, over both chunks."""
    return float(token_nll(model, chunks, None if policy == "full" else policy).double().mean())


def check(expected: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """One row per comparison; `agrees` says whether it holds."""
    model, _ = msrnn.load(dtype="float32", device=device)
    conditions = {
        "date": provenance.now(), "commit": provenance.commit(), "machine": provenance.machine(model.device),
        "versions": provenance.versions(), "command": provenance.command(),
        "dtype": "float32", "against": expected["machine"],
    }  # fmt: skip
    rows = []
    engine = Engine(model, ABOVE, batch=len(expected["prompts"]))
    ways = {
        "generate": [_greedy(model, prompt, ABOVE) for prompt in expected["prompts"]],
        "engine": engine.generate(expected["prompts"], max_new_tokens=NEW),
    }
    for way, texts in ways.items():
        same = sum(ours == theirs for ours, theirs in zip(texts, expected["written"], strict=True))
        rows.append({"what": f"greedy text by {way}", "policy": ABOVE, "texts": len(texts), "same": same,
                     "agrees": same == len(texts)})  # fmt: skip
    chunks = torch.tensor(expected["chunks"])
    for policy, nats in expected["nats"].items():
        ours = _nats(model, chunks, policy)
        off = math.exp(ours - nats) - 1
        rows.append({"what": "perplexity", "policy": policy, "cpu": math.exp(nats), "gpu": math.exp(ours),
                     "off": off, "tokens": chunks[:, 1:].numel(), "agrees": abs(off) <= WITHIN})  # fmt: skip
    return [conditions | row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("expect", "check"))
    parser.add_argument("expected", nargs="?", type=Path)
    parser.add_argument("--data", type=Path, help="a folder with pg19/*.txt")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.what == "expect":
        arguments.out.write_text(json.dumps(expect(arguments.data, arguments.length)))
        return
    rows = check(json.loads(arguments.expected.read_text()), arguments.device)
    with arguments.out.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for row in rows:
        print({name: row[name] for name in row if name not in ("versions", "date", "commit", "machine", "against")})
    raise SystemExit(not all(row["agrees"] for row in rows))


if __name__ == "__main__":
    main()
