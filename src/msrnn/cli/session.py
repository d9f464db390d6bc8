"""From a command's options to a loaded model with a policy, and the notes that say what it costs."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..system.console import note
from .options import POLICY

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..hf.cost import Cost
    from ..rnn import RNN


def policy_text(arguments: Namespace) -> str:
    """The policy of --policy and --profile as one text."""
    if arguments.profile:
        return f"{arguments.policy or 'tova'},profile={arguments.profile}"
    return arguments.policy or POLICY


def load_rnn(arguments: Namespace) -> tuple[RNN, Any]:
    """The model as an RNN, and its tokenizer."""
    from ..rnn import RNN

    model, tokenizer = load_model(arguments)
    rnn = RNN(model, policy_text(arguments), prompt=arguments.prompt_mode, length=arguments.length)
    return rnn, tokenizer


def load_model(arguments: Namespace) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer, as the options of `options.add_model` say."""
    import torch

    from ..hf.load import load

    silence_transformers()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return load(
        arguments.model,
        dtype=arguments.dtype,
        device=resolve_device(arguments.device),
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )


def silence_transformers() -> None:
    """transformers' own warnings and progress bars are not for the user of a command."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def resolve_device(text: str) -> str:
    """The device of --device, refused where torch does not see it."""
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


def config_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """The dtype that a model's configuration names, if any."""
    import torch

    dtype = getattr(config, "dtype", None)
    dtype = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def state_cost(rnn: RNN, length: int) -> Cost:
    """The cost of one sequence of `length` tokens."""
    from ..hf.cost import cost
    from ..hf.geometry import geometry

    return cost(geometry(rnn.model), rnn.plan, rnn.model.dtype, length)


def announce_cost(rnn: RNN, length: int | None) -> None:
    """Note what the state will cost; `length` is about the number of tokens, where known."""
    from ..system.sizes import human

    name = str(rnn.model.config.name_or_path).rstrip("/").split("/")[-1] or "the model"
    dtype = str(rnn.model.dtype).removeprefix("torch.")
    predicted = state_cost(rnn, length or 1000)
    tokens = f"about {length:,} tokens" if length else "every 1,000 tokens"
    bounded = all(policy.capacity for policy in rnn.plan.parts)
    state = f"{human(predicted.state)} per sequence" + ("" if bounded else f" for {tokens}")
    full = f"full cache {human(predicted.full)} for {tokens}"
    note(f"{rnn.plan} on {name} ({dtype}, {rnn.device}): state {state}; {full}")


def warn_beyond_context(rnn: RNN, length: int) -> None:
    """Note when a text is longer than the model's trained context: a bounded state reads on, but quality may drop."""
    context = getattr(rnn.model.config, "max_position_embeddings", None)
    if context and length > context:
        note(f"{length:,} tokens are more than the {context:,} that the model was trained on; quality may drop")
