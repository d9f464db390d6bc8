"""Question: in which domains and languages does a bounded state fail? Free word order is said to be hard.

Method: how much TOVA's perplexity exceeds full's, text by text: prose, code and legal text that come with Python, the
prose with the words of each sentence shuffled (no word order at all), and any texts of your own by name.

    python experiments/questions/domains.py --capacity 256 --own finnish=kalevala.txt,latin=caesar.txt
"""

import inspect
import random
import re
import turtle  # a long module of plain Python
from collections.abc import Iterator, Sequence
from pathlib import Path

import common

from msrnn.eval.perplexity import perplexity
from msrnn.system.text import read_blocks


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, own="")
    model, tokenizer = common.load_model(options)
    results = common.Results("domains", model, {"tokens": options.tokens})
    for name, text in texts(options.text, common.read_text(options), options.own):
        ids = common.encode(tokenizer, text, options.tokens)
        for policy in ("full", f"tova:{options.capacity}", f"window+4:{options.capacity}"):
            score = perplexity(model, ids, None if policy == "full" else policy)
            results.perplexity(policy, score.nll, score.tokens, text=name)
    results.show(options.output)


def texts(path: str | None, prose: str, own: str) -> Iterator[tuple[str, str]]:
    yield Path(path).stem if path else "documentation", prose
    yield "the same, words shuffled", shuffle_words(prose)
    yield "code", inspect.getsource(turtle)
    yield "legal", licence()
    for pair in filter(None, own.split(",")):
        name, _, own_path = pair.partition("=")
        yield name, "".join(read_blocks(own_path))


def shuffle_words(text: str) -> str:
    rng = random.Random(0)
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?])\s+", text)]
    for words in sentences:
        rng.shuffle(words)
    return " ".join(" ".join(words) for words in sentences)


def licence() -> str:
    import builtins

    builtins.license._Printer__setup()  # type: ignore[attr-defined]
    return "\n".join(builtins.license._Printer__lines)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
