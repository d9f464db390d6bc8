"""Question: past the trained length, how large is the error of re-rotating cached keys only every so many tokens?

Method: rows of a text are read with compressed gaps and with relative positions, the keys re-rotated before every
piece; pieces of one token are exact (a test compares them with the reference). Perplexity, and the mean difference of a
token's nats from the exact ones, by the length of the piece. All rows, with both kinds of positions, are one batch: one
token at a time is slow however few they are. In float32, as errors of repeated rotation add up.

    python experiments/questions/frozen_positions.py --text book.txt --rows 4 --tokens 640 --capacity 128
"""

from collections.abc import Sequence

import common
import torch
from torch import Tensor
from transformers import PreTrainedModel

from msrnn.budgets.calibrate import chunks_of
from msrnn.eval import positions
from msrnn.eval.perplexity import token_nll
from msrnn.hf.load import load

EXACT = 1
KINDS = {"gaps": positions.paper_gap, "relative": torch.ones_like}


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, tokens=640, capacity=128, rows=4, pieces="16,64,256")
    model, tokenizer = load(options.model, dtype="float32", device=options.device)
    ids = tokenizer(common.read_text(options), verbose=False)["input_ids"]
    rows, policy = chunks_of(ids, options.tokens, options.rows), f"tova:{options.capacity}"
    results = common.Results("frozen positions", model, {"rows": len(rows), "tokens": options.tokens})
    results.perplexity(policy, *summands(token_nll(model, rows, policy)), positions="plain")
    exact = by_kind(model, rows, policy, EXACT)
    for piece in (EXACT, *map(int, options.pieces.split(","))):
        losses = exact if piece == EXACT else by_kind(model, rows, policy, piece)
        for name, nll in losses.items():
            off = round(float((nll - exact[name]).abs().mean()), 4)
            results.perplexity(policy, *summands(nll), positions=name, piece=piece, off=off)
    results.show(options.output)


def by_kind(model: PreTrainedModel, rows: Tensor, policy: str, piece: int) -> dict[str, Tensor]:
    """The nats of every token by kind of positions: one batch, in which each kind has all the rows."""

    def gap(gaps: Tensor) -> Tensor:
        parts = zip(KINDS.values(), gaps.chunk(len(KINDS)), strict=True)
        return torch.cat([kind(part) for kind, part in parts])

    scheme = positions.PiecePositions(gap, positions.Rotary.of(model))
    nll = token_nll(model, rows.repeat(len(KINDS), 1), policy, piece=piece, positions=scheme)
    return dict(zip(KINDS, nll.chunk(len(KINDS)), strict=True))


def summands(nll: Tensor) -> tuple[Tensor, int]:
    return nll.to(torch.float64), nll.numel()


if __name__ == "__main__":
    main()
