"""Question: what becomes of exact recall where the answer must be computed, as in arithmetic?

Method: numbers are stated at the beginning ("the red box holds 3 coins"), then comes a text, then a question about the
sum of two. How likely is the right number under each policy, and how often is it the likeliest of all numbers?

    python experiments/questions/arithmetic.py --text book.txt --capacity 256 --sums 20
"""

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import common
import torch

from msrnn.eval.perplexity import new_cache

COLOURS = ("red", "blue", "green", "black", "white")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, tokens=1000, sums=10)
    model, tokenizer = common.load_model(options)
    filler = tokenizer.decode(common.encode(tokenizer, common.read_text(options), options.tokens))
    results = common.Results("arithmetic", model, {"tokens": options.tokens})
    for policy in ("full", f"tova:{options.capacity}", f"window+4:{options.capacity}"):
        answers = [ask(model, tokenizer, policy, filler, seed) for seed in range(options.sums)]
        parts = {str(seed): {"right": float(right), "count": 1.0} for seed, (_, right) in enumerate(answers)}
        right = round(sum(right for _, right in answers) / len(answers), 3)
        mean = math.fsum(nats for nats, _ in answers) / len(answers)
        results.add(policy, "mean nats of the answer", mean, {"right": right}, parts, len(answers))
    results.show(options.output)


@torch.no_grad()
def ask(model: Any, tokenizer: Any, policy: str, filler: str, seed: int) -> tuple[float, bool]:
    """Nats of the right sum, and whether it is the likeliest of 2 to 8."""
    rng = random.Random(seed)
    boxes = {colour: rng.randint(1, 4) for colour in COLOURS}
    one, other = rng.choice(list(combinations(COLOURS, 2)))
    facts = " ".join(f"The {colour} box holds {count} coins." for colour, count in boxes.items())
    prompt = f"{facts}\n\n{filler}\n\nTogether, the {one} box and the {other} box hold this many coins:"
    cache = new_cache(model, None if policy == "full" else policy)
    ids = torch.tensor([tokenizer(prompt)["input_ids"] + number(tokenizer, 2)[:-1]], device=model.device)
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].float()
    log_probs = logits.log_softmax(-1)
    nats = {total: -float(log_probs[number(tokenizer, total)[-1]]) for total in range(2, 9)}
    right = boxes[one] + boxes[other]
    return nats[right], min(nats, key=lambda total: nats[total]) == right


def number(tokenizer: Any, total: int) -> list[int]:
    """The tokens of ' 7'; only the last tells numbers apart."""
    ids: list[int] = tokenizer(f" {total}", add_special_tokens=False)["input_ids"]
    return ids


if __name__ == "__main__":
    main()
