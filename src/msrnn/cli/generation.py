"""Prefill and decode one prompt: by msrnn's engine, which is faster on a GPU, or by transformers' `generate`."""

from __future__ import annotations

import secrets
import time
from argparse import Namespace
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .prefill import position_limit, prefill, prefill_progress
from .session import warn_beyond_context

if TYPE_CHECKING:
    from ..rnn import RNN, RNNState


@dataclass(frozen=True)
class Generation:
    """New tokens, and what they took: tokens of the prompt, tokens held at the end, seconds of prefill and decode."""

    prompt_length: int
    tokens: list[int]
    held: int
    prefill_seconds: float
    decode_seconds: float


def generate(arguments: Namespace, rnn: RNN, tokenizer: Any, ids: Iterator[int], total: int | None) -> Generation:
    """Continue the prompt `ids`; `total` is about their number, where it is known."""
    if use_engine(arguments, rnn):
        from ..hf.geometry import Unsupported

        prompt = array("i", ids)
        try:
            return _with_engine(arguments, rnn, tokenizer, prompt)
        except Unsupported:  # layers without keys and values
            if arguments.engine == "on":
                raise
        ids = iter(prompt)
    return _with_transformers(arguments, rnn, tokenizer, ids, total)


def use_engine(arguments: Namespace, rnn: RNN) -> bool:
    """Whether the engine runs this: on a GPU, unless an option needs transformers."""
    needs_transformers = {
        "--num-beams": arguments.num_beams > 1,
        "--repetition-penalty": arguments.repetition_penalty != 1,
        "--prompt-mode oneshot": arguments.prompt_mode == "oneshot",
    }
    reasons = [name for name, needed in needs_transformers.items() if needed]
    if arguments.engine == "on" and reasons:
        raise ValueError(f"msrnn's engine has no {reasons[0]}; leave it out, or leave out --engine")
    return arguments.engine == "on" or (arguments.engine == "auto" and rnn.device.type == "cuda" and not reasons)


def _with_engine(arguments: Namespace, rnn: RNN, tokenizer: Any, prompt: array[int]) -> Generation:
    import torch
    from transformers import TextStreamer

    from ..engine.engine import Engine
    from ..engine.request import Request

    engine = Engine(rnn.model, rnn.plan, batch=1, length=len(prompt) + arguments.max_new_tokens)
    if not arguments.quiet:
        warn_beyond_context(rnn, len(prompt))
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if arguments.stream else None
    times = [time.perf_counter()]
    with prefill_progress(len(prompt), arguments.quiet) as bar:

        def on_token(token: int) -> None:
            if len(times) == 1:  # the first token ends the prefill
                times.append(time.perf_counter())
                bar.close()
            if streamer is not None:
                streamer.put(torch.tensor([token]))

        request = Request(
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p or 1.0,
            seed=secrets.randbits(63) if arguments.seed is None else arguments.seed,
            on_token=on_token,
            on_read=bar.update,
        )
        with position_limit(rnn):
            tokens = next(engine.run([request])).tokens
    if streamer is not None:
        streamer.end()
    start, first_token = times
    held = held_tokens(rnn, len(prompt) + len(tokens) - 1)
    return Generation(len(prompt), tokens, held, first_token - start, time.perf_counter() - first_token)


def held_tokens(rnn: RNN, length: int) -> int:
    """Tokens that the largest layer holds after `length` tokens."""
    from ..core.slots import slot_count
    from ..hf.geometry import geometry
    from ..plan import parts

    layers = zip(rnn.plan.policies, geometry(rnn.model), strict=True)
    counts = [slot_count(part, layer.window) for policy, layer in layers for part in parts(policy)]
    return max(length if count is None else min(length, count - 1) for count in counts)


def _with_transformers(
    arguments: Namespace, rnn: RNN, tokenizer: Any, ids: Iterator[int], total: int | None
) -> Generation:
    start = time.perf_counter()
    prompt, state = _prefill_all_but_last(rnn, ids, total, arguments.quiet)
    if not arguments.quiet:
        warn_beyond_context(rnn, len(prompt))
    prefilled = time.perf_counter()
    tokens = _decode(arguments, rnn, tokenizer, prompt, state)
    return Generation(len(prompt), tokens, state.held, prefilled - start, time.perf_counter() - prefilled)


def _prefill_all_but_last(rnn: RNN, ids: Iterator[int], total: int | None, quiet: bool) -> tuple[array[int], RNNState]:
    """All ids, and the state after all but the last: `generate` needs one token to begin with."""
    from ..rnn import pieces

    prompt, pending = array("i"), array("i")

    def all_but_last() -> Iterator[list[int]]:
        nonlocal pending
        for piece in pieces(ids, rnn.piece):
            prompt.extend(piece)
            yield from [pending.tolist()] if pending else []
            pending = array("i", piece)
        yield from [pending.tolist()[:-1]] if len(pending) > 1 else []

    state = rnn.start()
    if rnn.prompt == "oneshot":  # one call must see the whole prompt: that of `generate`
        prompt.extend(ids)
        return prompt, state
    return prompt, prefill(rnn, all_but_last(), state, total=total, quiet=quiet)[1]


def _decode(arguments: Namespace, rnn: RNN, tokenizer: Any, prompt: array[int], state: RNNState) -> list[int]:
    """The new ids; the state's cache is updated with them."""
    import torch
    from transformers import TextStreamer

    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    if arguments.num_beams > 1:
        state.cache.batch_repeat_interleave(arguments.num_beams)
    input_ids = torch.tensor([prompt], dtype=torch.long, device=rnn.device)
    sampling: dict[str, float | None] = {"temperature": None, "top_p": None, "top_k": None}
    if arguments.temperature > 0:
        sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k or 0}
    sequences = rnn.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=state.cache,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.temperature > 0,
        repetition_penalty=arguments.repetition_penalty,
        num_beams=arguments.num_beams,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if arguments.stream else None,
        **sampling,
    )
    tokens: list[int] = sequences[0, len(prompt) :].tolist()
    return tokens
