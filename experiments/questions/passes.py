"""Question: does it help a bounded state to read a long text several times?

Method: the same text is read again and again into one state; perplexity of each pass under full, TOVA and window+4.
If a pass left something useful behind, the next one is easier; full, which forgets nothing, shows how much easier.

    python experiments/questions/passes.py --text book.txt --tokens 1500 --capacity 512 --passes 3
"""

from collections.abc import Sequence

from msrnn.analysis import question
from msrnn.eval.perplexity import empty, score


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, tokens=1500, capacity=512, passes=3)
    model, tokenizer = question.opened(options)
    ids = question.ids_of(tokenizer, question.text_of(options), options.tokens)
    answer = question.Answer("several passes", model, {"tokens": len(ids)})
    for policy in ("full", f"tova:{options.capacity}", f"window+4:{options.capacity}"):
        state = empty(model, None if policy == "full" else policy)
        for number in range(1, options.passes + 1):
            found = score(model, ids, state)
            answer.perplexity(policy, found.nll, found.tokens, reading=number)
    answer.show(options.output)


if __name__ == "__main__":
    main()
