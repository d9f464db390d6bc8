"""A prompt read and gone on with: by msrnn's engine, which is the faster on a GPU, or by transformers' `generate`."""

from __future__ import annotations

import secrets
import time
from argparse import Namespace
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .prompt import beyond, feed, progress
from .session import warn_beyond

if TYPE_CHECKING:
    from ..rnn import RNN, RNNState


@dataclass(frozen=True)
class Written:
    """What came of a prompt: tokens read, the new ones, tokens held in the end, and the seconds of both parts."""

    read: int
    tokens: list[int]
    held: int
    reading: float
    writing: float


def write(arguments: Namespace, rnn: RNN, tokenizer: Any, ids: Iterator[int], total: int | None) -> Written:
    """`total` is about the number of tokens in `ids`, where it is known."""
    if wants_engine(arguments, rnn):
        from ..hf.cache import Unsupported

        read = array("i", ids)
        try:
            return _by_engine(arguments, rnn, tokenizer, read)
        except Unsupported:  # layers that hold no keys and values
            if arguments.engine == "on":
                raise
        ids = iter(read)
    return _by_generate(arguments, rnn, tokenizer, ids, total)


def wants_engine(arguments: Namespace, rnn: RNN) -> bool:
    """On a GPU, unless something is asked for that only transformers does."""
    others = {
        "--num-beams": arguments.num_beams > 1,
        "--repetition-penalty": arguments.repetition_penalty != 1,
        "--prompt-mode oneshot": arguments.prompt_mode == "oneshot",
    }
    asked = [name for name, given in others.items() if given]
    if arguments.engine == "on" and asked:
        raise ValueError(f"msrnn's engine has no {asked[0]}; leave it out, or leave out --engine")
    return arguments.engine == "on" or (arguments.engine == "auto" and rnn.device.type == "cuda" and not asked)


def _by_engine(arguments: Namespace, rnn: RNN, tokenizer: Any, read: array[int]) -> Written:
    from transformers import TextStreamer

    from ..engine.engine import Engine, Request

    engine = Engine(rnn.model, rnn.plan, batch=1, length=len(read) + arguments.max_new_tokens)
    if not arguments.quiet:
        warn_beyond(rnn, len(read))
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if arguments.stream else None
    clock = [time.perf_counter()]
    with progress(len(read), arguments.quiet) as bar:

        def take(token: int) -> None:
            if len(clock) == 1:  # the prompt is read
                clock.append(time.perf_counter())
                bar.close()
            if streamer is not None:
                streamer.put(_tensor([token]))

        request = Request(
            read,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p or 1.0,
            seed=secrets.randbits(63) if arguments.seed is None else arguments.seed,
            on_token=take,
            on_read=bar.update,
        )
        with beyond(rnn):
            tokens = next(engine.run([request])).tokens
    if streamer is not None:
        streamer.end()
    reading, writing = clock[1] - clock[0], time.perf_counter() - clock[1]
    return Written(len(read), tokens, held_by(rnn, len(read) + len(tokens) - 1), reading, writing)


def held_by(rnn: RNN, tokens: int) -> int:
    """How many of so many tokens the layer that keeps most of them holds."""
    from ..core.slots import slots
    from ..hf.cache import geometry

    rooms = [slots(policy, layer.window) for policy, layer in zip(rnn.plan.policies, geometry(rnn.model), strict=True)]
    return max(tokens if room is None else min(tokens, room - 1) for room in rooms)


def _by_generate(arguments: Namespace, rnn: RNN, tokenizer: Any, ids: Iterator[int], total: int | None) -> Written:
    began = time.perf_counter()
    read, state = take_in(rnn, ids, total, arguments.quiet)
    if not arguments.quiet:
        warn_beyond(rnn, len(read))
    between = time.perf_counter()
    tokens = _go_on(arguments, rnn, tokenizer, read, state)
    return Written(len(read), tokens, state.held, between - began, time.perf_counter() - between)


def take_in(rnn: RNN, ids: Iterator[int], total: int | None, quiet: bool) -> tuple[array[int], RNNState]:
    """All ids, of which the state has read all but the last: that one is for `generate` to begin with."""
    from ..rnn import pieces

    read, kept = array("i"), array("i")

    def ready() -> Iterator[list[int]]:
        nonlocal kept
        for piece in pieces(ids, rnn.piece):
            read.extend(piece)
            yield from [kept.tolist()] if kept else []
            kept = array("i", piece)
        yield from [kept.tolist()[:-1]] if len(kept) > 1 else []

    state = rnn.start()
    if rnn.prompt == "oneshot":  # one call must see the whole prompt, and `generate` makes it
        read.extend(ids)
        return read, state
    return read, feed(rnn, ready(), state, total=total, quiet=quiet)[1]


def _go_on(arguments: Namespace, rnn: RNN, tokenizer: Any, read: array[int], state: RNNState) -> list[int]:
    """The new ids. The state moves on with them."""
    import torch
    from transformers import TextStreamer

    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    if arguments.num_beams > 1:
        state.cache.batch_repeat_interleave(arguments.num_beams)
    prompt = torch.tensor([read], dtype=torch.long, device=rnn.device)
    sampling: dict[str, float | None] = {"temperature": None, "top_p": None, "top_k": None}
    if arguments.temperature > 0:
        sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k or 0}
    made = rnn.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=state.cache,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.temperature > 0,
        repetition_penalty=arguments.repetition_penalty,
        num_beams=arguments.num_beams,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if arguments.stream else None,
        **sampling,
    )
    new: list[int] = made[0, len(read) :].tolist()
    return new


def _tensor(ids: list[int]) -> Any:
    import torch

    return torch.tensor(ids)
