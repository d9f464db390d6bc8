"""Question: in TOVA every layer evicts on its own. How much does it matter which layer scores?

Method: a text is read under TOVA and traced. Then the evictions of one layer are applied to all layers, for each of
several layers, and the perplexity is compared with that of TOVA and of a window.

    python experiments/questions/scoring_layer.py --text book.txt --capacity 256 --layers 8
"""

from collections.abc import Sequence

import common
import torch
from evictions import expiry_by_priority, scheduled_nll

from msrnn.analysis.measure import trace_text
from msrnn.core.trace import ALIVE


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, layers=8)
    model, tokenizer = common.load_model(options)
    ids = common.encode(tokenizer, common.read_text(options), options.tokens)
    results = common.Results("which layer scores", model, {"tokens": len(ids)})
    policy, count = f"tova:{options.capacity}", len(ids) - 1
    trace = trace_text(model, ids, policy)
    results.perplexity(policy, float(trace.notes["nll"]), count, scored_by="every layer itself")
    depth = len(trace.deaths)
    layers = sorted({round(i * (depth - 1) / max(options.layers - 1, 1)) for i in range(min(options.layers, depth))})
    for layer in layers:
        nll = scheduled_nll(model, ids, trace.deaths[layer][0, 0])
        results.perplexity(policy, nll, count, scored_by=f"layer {layer}")
    window = expiry_by_priority(range(len(ids)), options.capacity)
    results.perplexity(f"window:{options.capacity}", scheduled_nll(model, ids, window), count, scored_by="age")
    everything = torch.full((len(ids),), ALIVE, dtype=torch.int32)
    results.perplexity("full", scheduled_nll(model, ids, everything), count, scored_by="nobody")
    results.show(options.output)


if __name__ == "__main__":
    main()
