"""Question: does it help a bounded state to read a long text several times?

Method: the same text is read repeatedly into one state; perplexity of each pass under full, TOVA and window+4. If the
state holds something useful from a pass, the next one is easier; full, which evicts nothing, shows how much easier.

    python experiments/questions/passes.py --text book.txt --tokens 1500 --capacity 512 --passes 3
"""

from collections.abc import Sequence

import common

from msrnn.eval.perplexity import new_cache, score


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, tokens=1500, capacity=512, passes=3)
    model, tokenizer = common.load_model(options)
    ids = common.encode(tokenizer, common.read_text(options), options.tokens)
    results = common.Results("several passes", model, {"tokens": len(ids)})
    for policy in ("full", f"tova:{options.capacity}", f"window+4:{options.capacity}"):
        cache = new_cache(model, None if policy == "full" else policy)
        for number in range(1, options.passes + 1):
            result = score(model, ids, cache)
            results.perplexity(policy, result.nll, result.tokens, reading=number)
    results.show(options.output)


if __name__ == "__main__":
    main()
