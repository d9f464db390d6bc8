"""Question: TOVA lets every layer choose for itself. How much does it matter which layer scores?

Method: a text is read under TOVA and traced. Then the choices of one layer are imposed on all layers, for each of
several layers, and the perplexity is compared with that of every layer choosing for itself, and with a window's.

    python experiments/questions/scoring_layer.py --text book.txt --capacity 256 --layers 8
"""

from collections.abc import Sequence

import torch

from msrnn.analysis import question
from msrnn.analysis.imposed import deaths_by, imposed_nll
from msrnn.analysis.measure import read
from msrnn.core.trace import ALIVE


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, layers=8)
    model, tokenizer = question.opened(options)
    ids = question.ids_of(tokenizer, question.text_of(options), options.tokens)
    answer = question.Answer("which layer scores", model, {"tokens": len(ids)})
    policy, count = f"tova:{options.capacity}", len(ids) - 1
    trace = read(model, ids, policy)
    answer.perplexity(policy, float(trace.notes["nll"]), count, scored_by="every layer itself")
    depth = len(trace.deaths)
    chosen = sorted({round(i * (depth - 1) / max(options.layers - 1, 1)) for i in range(min(options.layers, depth))})
    for layer in chosen:
        nll = imposed_nll(model, ids, trace.deaths[layer][0, 0])
        answer.perplexity(policy, nll, count, scored_by=f"layer {layer}")
    window = deaths_by(range(len(ids)), options.capacity)
    answer.perplexity(f"window:{options.capacity}", imposed_nll(model, ids, window), count, scored_by="age")
    everything = torch.full((len(ids),), ALIVE, dtype=torch.int32)
    answer.perplexity("full", imposed_nll(model, ids, everything), count, scored_by="nobody")
    answer.show(options.output)


if __name__ == "__main__":
    main()
