"""`fade` and `blend` in the same bytes: does the residual earn its memory, plain and as `best` would have it?

    python experiments/blend.py --data DATA --dtype bfloat16 --half reporting --slots 64 --slots 256

For every number of plain slots: `fade` and `blend` in their bytes, and with the slot format and budgets of `best`.
"""

from __future__ import annotations

from pathlib import Path

from books import (
    Losses,
    interval,
    load_model,
    measurements_path,
    novels,
    options,
    perplexity,
    records,
    save,
    show,
    split,
)

from msrnn.hf.best import resolution, resolve
from msrnn.policy import split_policy


def pairs(model: object, slots: int) -> list[tuple[str, str]]:
    """Texts of `fade` and `blend` in the bytes of so many plain slots."""
    best = resolution(f"best:{slots}", model)  # type: ignore[arg-type]
    kinds = [split_policy("fade"), split_policy(best.policy)]
    texts = [kind.with_size(f"{best.limit_bytes}B") for kind in kinds]
    return [tuple(str(resolve(one, model)) for one in (text, text.replace("fade", "blend", 1))) for text in texts]  # type: ignore[misc,arg-type]


def main() -> None:
    parser = options(__doc__ or "", "results/part/blend.jsonl")
    parser.add_argument("--slots", type=int, action="append", required=True)
    parser.add_argument("--half", choices=("choosing", "reporting"), default="choosing")
    parser.set_defaults(length=2048, chunks=1)
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments)
    books = novels(tokenizer, split(arguments.data)[arguments.half == "reporting"], arguments.length, arguments.chunks)
    name = f"blend-{arguments.half}"
    model_name = Path(arguments.model or "bundled").name
    path = measurements_path(arguments, f"{name}-{model_name}-{arguments.length}")
    losses = Losses(model, books, arguments.batch, path, name)
    full, policies = losses.of("full"), {"full": ("full", None)}
    for slots in arguments.slots:
        for fade, blend in pairs(model, slots):
            ours, theirs = losses.of(blend), losses.of(fade)
            gap = interval(lambda f, a, b: (b - f) / (a - f), full, theirs, ours)
            print(
                f"{fade}: {perplexity(theirs):.4f}; {blend}: {perplexity(ours):.4f}, {show(gap)} of its gap", flush=True
            )
            policies |= {text: (text, slots) for text in (fade, blend)}
    settings = {"length": arguments.length, "chunks": arguments.chunks, "half": arguments.half}
    save(arguments.out, records(losses, name, policies, settings))


if __name__ == "__main__":
    main()
