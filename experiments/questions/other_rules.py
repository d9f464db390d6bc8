"""Question: are other rules as good as attention at equal capacity: position, chance, frequency, or a learned one?

Method: each rule gives every token a fixed priority; the lowest is evicted, in all layers alike. Every rule protects
the first tokens (attention sinks) and the newest ones. Frequency keeps tokens that are rare so far; the learned rule
gives a token the mean number of steps that TOVA kept this token id on the text's other half.

    python experiments/questions/other_rules.py --text book.txt --capacity 256
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import common
import torch
from evictions import expiry_by_priority, scheduled_nll

from msrnn.analysis.measure import trace_text
from msrnn.analysis.retention import steps_kept
from msrnn.core.trace import Trace
from msrnn.eval.perplexity import perplexity

FIRST = 4


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, recent=0.5)
    model, tokenizer = common.load_model(options)
    ids = common.encode(tokenizer, common.read_text(options), 2 * options.tokens)
    training, ids = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    results = common.Results("other rules", model, {"tokens": len(ids), "recent": options.recent})
    size, last, count = options.capacity, int(options.capacity * options.recent), len(ids) - 1
    for policy in ("full", f"tova:{size}", f"tova:{size},last={last}", f"h2o:{size}", f"window+4:{size}"):
        score = perplexity(model, ids, None if policy == "full" else policy)
        results.perplexity(policy, score.nll, count)
    trace = trace_text(model, training, f"tova:{size}")
    for name, rule in rules(trace).items():
        priority = [math.inf] * FIRST + rule(ids)[FIRST:]
        nll = scheduled_nll(model, ids, expiry_by_priority(priority, size, last))
        results.perplexity(f"{name}+{FIRST}:{size},last={last}", nll, count)
    results.show(options.output)


def rules(trace: Trace) -> dict[str, Callable[[Sequence[int]], list[float]]]:
    """The priority of each token by rule, from the token ids alone."""
    return {"chance": chance, "first": first, "every 8th": every_eighth, "rare": rare, "learned": learned(trace)}


def chance(ids: Sequence[int]) -> list[float]:
    rng = random.Random(0)
    return [rng.random() for _ in ids]


def first(ids: Sequence[int]) -> list[float]:
    return [-float(place) for place in range(len(ids))]


def every_eighth(ids: Sequence[int]) -> list[float]:
    return [float(place % 8 == 0) for place in range(len(ids))]


def rare(ids: Sequence[int]) -> list[float]:
    counts: Counter[int] = Counter()
    priority = []
    for token in ids:
        counts[token] += 1
        priority.append(-float(counts[token]))
    return priority


def learned(trace: Trace) -> Callable[[Sequence[int]], list[float]]:
    """The mean steps that TOVA kept a token id; ids that the trace does not have get the mean of all."""
    assert trace.tokens is not None
    lifetimes = steps_kept(trace).mean(0)
    by_token: defaultdict[int, list[float]] = defaultdict(list)
    for token, steps in zip(trace.tokens[0].tolist(), lifetimes.tolist(), strict=True):
        by_token[token].append(steps)
    mean = float(torch.mean(lifetimes))
    return lambda ids: [sum(by_token[t]) / len(by_token[t]) if t in by_token else mean for t in ids]


if __name__ == "__main__":
    main()
