"""Question: past the trained length, how far off is it to turn the keys only every so many tokens?

Method: rows of a text are read with compressed gaps and with relative positions, the keys turned before every piece;
pieces of one token are exact (a test holds them to the reference). Perplexity, and the mean difference from exact of a
token's nats, by the length of the piece. All rows, with both kinds of positions, are read at once: one token at a time
is slow however few they are. In float32, as keys are turned again and again.

    python experiments/questions/frozen_positions.py --text book.txt --rows 4 --tokens 640 --capacity 128
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.analysis import question
from msrnn.budgets.calibrate import chunks_of
from msrnn.eval import positions
from msrnn.eval.scoring import token_nll
from msrnn.hf.load import load

EXACT = 1
KINDS = {"gaps": positions.paper_gap, "relative": torch.ones_like}


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, tokens=640, capacity=128, rows=4, pieces="16,64,256")
    model, tokenizer = load(options.model, dtype="float32", device=options.device)
    ids = tokenizer(question.text_of(options), verbose=False)["input_ids"]
    rows, policy = chunks_of(ids, options.tokens, options.rows), f"tova:{options.capacity}"
    answer = question.Answer("frozen positions", model, {"rows": len(rows), "tokens": options.tokens})
    answer.perplexity(policy, *counted(token_nll(model, rows, policy)), positions="plain")
    exact = by_kind(model, rows, policy, EXACT)
    for piece in (EXACT, *map(int, options.pieces.split(","))):
        found = exact if piece == EXACT else by_kind(model, rows, policy, piece)
        for name, nll in found.items():
            off = round(float((nll - exact[name]).abs().mean()), 4)
            answer.perplexity(policy, *counted(nll), positions=name, piece=piece, off=off)
    answer.show(options.output)


def by_kind(model: PreTrainedModel, rows: Tensor, policy: str, piece: int) -> dict[str, Tensor]:
    """The nats of every token by kind of positions: one batch, in which each kind has all the rows."""

    def gap(found: Tensor) -> Tensor:
        parts = zip(KINDS.values(), found.chunk(len(KINDS)), strict=True)
        return torch.cat([counts(part) for counts, part in parts])

    frozen = positions.Frozen(gap, positions.Rotary.of(model))
    nll = token_nll(model, rows.repeat(len(KINDS), 1), policy, piece=piece, positions=frozen)
    return dict(zip(KINDS, nll.chunk(len(KINDS)), strict=True))


def counted(nll: Tensor) -> tuple[Tensor, int]:
    return nll.to(torch.float64), nll.numel()


if __name__ == "__main__":
    main()
