"""Prefill with a progress bar: pieces of one sequence are read into a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..system.console import progress

if TYPE_CHECKING:
    from torch import Tensor

    from ..rnn import RNN, RNNState


def prefill(
    rnn: RNN, pieces: Iterable[list[int]], state: RNNState, *, total: int | None = None, quiet: bool = False
) -> tuple[Tensor | None, RNNState]:
    """Read pieces of one sequence; the logits of the last token, and the state after it."""
    import torch

    logits = None
    with prefill_progress(total, quiet) as bar:
        for piece in pieces:
            with position_limit(rnn):
                logits, state = rnn.step(torch.tensor([piece], device=rnn.device), state)
            bar.update(len(piece))
    return logits, state


def prefill_progress(total: int | None, quiet: bool) -> Any:
    """A progress bar that counts tokens."""
    return progress(total, "prefill", "tok", quiet)


@contextmanager
def position_limit(rnn: RNN) -> Iterator[None]:
    """Turn the IndexError past the last learned position embedding into an answer."""
    try:
        yield
    except IndexError as error:
        positions = getattr(rnn.model.config, "max_position_embeddings", "so many")
        raise ValueError(f"the model knows {positions} positions and no more; give a shorter text") from error
