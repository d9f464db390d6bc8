"""From a command's options to a loaded model bounded by a policy, and the line that says what it will take."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from .options import POLICY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..hf.cost import Cost
    from ..policy import PolicyLike
    from ..rnn import RNN


def policy_of(arguments: Namespace) -> PolicyLike:
    """The policy as asked for; with a profile, one per layer."""
    if arguments.profile:
        return f"{arguments.policy or 'tova'},profile={arguments.profile}"
    return arguments.policy or POLICY


def open_rnn(arguments: Namespace) -> tuple[RNN, Any]:
    """The model as an RNN, and its tokenizer."""
    from ..rnn import RNN

    model, tokenizer = open_model(arguments)
    rnn = RNN(model, policy_of(arguments), prompt=arguments.prompt_mode, length=arguments.length)
    return rnn, tokenizer


def open_model(arguments: Namespace) -> tuple[PreTrainedModel, Any]:
    import torch

    from ..hf.load import load

    hush()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return load(
        arguments.model,
        dtype=arguments.dtype,
        device=device_of(arguments.device),
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )


def hush() -> None:
    """transformers' own warnings and bars are not for the user of a command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def device_of(text: str) -> str:
    import torch

    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()):
        raise ValueError(f"unknown device {text!r}; use cpu, cuda, cuda:0 or mps")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {text}: torch sees {torch.cuda.device_count()} CUDA devices here; use cpu")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: torch sees no such device here; use cpu")
    return text


def cost_of(rnn: RNN, length: int) -> Cost:
    from ..hf.cache import geometry
    from ..hf.cost import cost

    return cost(geometry(rnn.model), rnn.plan, rnn.model.dtype, length)


def announce(rnn: RNN, length: int | None) -> None:
    """What the state will take, before anything is computed; `length` is about the number of tokens, where known."""
    from ..hf.cost import human

    name = str(rnn.model.config.name_or_path).rstrip("/").split("/")[-1] or "the model"
    dtype = str(rnn.model.dtype).removeprefix("torch.")
    price = cost_of(rnn, length or 1000)
    tokens = f"about {length:,} tokens" if length else "every 1,000 tokens"
    bounded = all(policy.capacity for policy in rnn.plan.policies)
    state = f"{human(price.state)} per sequence" + ("" if bounded else f" for {tokens}")
    note(f"{rnn.plan} on {name} ({dtype}, {rnn.device}): state {state}; full cache {human(price.full)} for {tokens}")


def warn_beyond(rnn: RNN, length: int) -> None:
    """A bounded state takes any length, but a model knows only the positions it was trained on."""
    known = getattr(rnn.model.config, "max_position_embeddings", None)
    if known and length > known:
        note(f"{length:,} tokens are more than the {known:,} that the model was trained on; what it writes may suffer")


def note(text: str) -> None:
    print(f"msrnn: {text}", file=sys.stderr, flush=True)
