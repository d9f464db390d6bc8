"""Question: past the trained length, how far off is it to turn the keys only every so many tokens?

Method: rows of a text are read with compressed gaps and with relative positions, the keys turned before every piece;
pieces of one token are exact (a test holds them to the reference). Perplexity, and the mean difference from exact of a
token's nats, by the length of the piece. All rows are read at once; in float32, as keys are turned again and again.

    python experiments/questions/frozen_positions.py --text book.txt --rows 4 --tokens 640 --capacity 128
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from msrnn.analysis import question
from msrnn.calibrate import chunks_of
from msrnn.eval import positions
from msrnn.eval.read import token_nll
from msrnn.models import load

EXACT = 1


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, tokens=640, capacity=128, rows=4, pieces="16,64,256")
    model, tokenizer = load(options.model, dtype="float32", device=options.device)
    ids = tokenizer(question.text_of(options), verbose=False)["input_ids"]
    rows, policy = chunks_of(ids, options.tokens, options.rows), f"tova:{options.capacity}"
    answer = question.Answer("frozen positions", model, {"rows": len(rows), "tokens": options.tokens})
    answer.perplexity(policy, *counted(token_nll(model, rows, policy)), positions="plain")
    for name in ("gaps", "relative"):
        exact = None
        for piece in (EXACT, *map(int, options.pieces.split(","))):
            found = token_nll(model, rows, policy, piece=piece, positions=positions.mode(name, model))
            exact = found if exact is None else exact
            off = round(float((found - exact).abs().mean()), 4)
            answer.perplexity(policy, *counted(found), positions=name, piece=piece, off=off)
    answer.show(options.output)


def counted(nll: Tensor) -> tuple[Tensor, int]:
    return nll.to(torch.float64), nll.numel()


if __name__ == "__main__":
    main()
