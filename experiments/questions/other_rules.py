"""Question: are there rules as good as attention at the same size: position, chance, frequency, or one that is learned?

Method: each rule gives every token a priority when it comes; the lowest leaves, in all layers alike. The first tokens
stay under every rule, as a model without them is lost, and so do the newest. Frequency keeps words that are rare so
far; the learned rule keeps a token as long as TOVA kept its kind on the text's other half.

    python experiments/questions/other_rules.py --text book.txt --capacity 256
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch

from msrnn.analysis import question
from msrnn.analysis.imposed import deaths_by, imposed_nll
from msrnn.analysis.measure import read
from msrnn.analysis.retention import steps_kept
from msrnn.core.trace import Trace
from msrnn.eval.perplexity import perplexity

FIRST = 4


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, recent=0.5)
    model, tokenizer = question.opened(options)
    ids = question.ids_of(tokenizer, question.text_of(options), 2 * options.tokens)
    taught, ids = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    answer = question.Answer("other rules", model, {"tokens": len(ids), "recent": options.recent})
    size, last, count = options.capacity, int(options.capacity * options.recent), len(ids) - 1
    for policy in ("full", f"tova:{size}", f"tova:{size},last={last}", f"h2o:{size}", f"window+4:{size}"):
        found = perplexity(model, ids, None if policy == "full" else policy)
        answer.perplexity(policy, found.nll, count)
    lesson = read(model, taught, f"tova:{size}")
    for name, rule in rules(lesson).items():
        worth = [math.inf] * FIRST + rule(ids)[FIRST:]
        nll = imposed_nll(model, ids, deaths_by(worth, size, last))
        answer.perplexity(f"{name}+{FIRST}:{size},last={last}", nll, count)
    answer.show(options.output)


def rules(lesson: Trace) -> dict[str, Callable[[Sequence[int]], list[float]]]:
    """What each token is worth when it comes, from the tokens alone."""
    return {"chance": chance, "first": first, "every 8th": every_eighth, "rare": rare, "learned": learned(lesson)}


def chance(ids: Sequence[int]) -> list[float]:
    dice = random.Random(0)
    return [dice.random() for _ in ids]


def first(ids: Sequence[int]) -> list[float]:
    return [-float(place) for place in range(len(ids))]


def every_eighth(ids: Sequence[int]) -> list[float]:
    return [float(place % 8 == 0) for place in range(len(ids))]


def rare(ids: Sequence[int]) -> list[float]:
    seen: Counter[int] = Counter()
    worth = []
    for token in ids:
        seen[token] += 1
        worth.append(-float(seen[token]))
    return worth


def learned(lesson: Trace) -> Callable[[Sequence[int]], list[float]]:
    """The mean steps that TOVA kept a token of this kind; kinds it has not met are worth the mean of all."""
    assert lesson.tokens is not None
    kept = steps_kept(lesson).mean(0)
    by_kind: defaultdict[int, list[float]] = defaultdict(list)
    for token, steps in zip(lesson.tokens[0].tolist(), kept.tolist(), strict=True):
        by_kind[token].append(steps)
    mean = float(torch.mean(kept))
    return lambda ids: [sum(by_kind[t]) / len(by_kind[t]) if t in by_kind else mean for t in ids]


if __name__ == "__main__":
    main()
