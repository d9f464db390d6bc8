"""`msrnn info`: what a policy costs on a model, without loading its weights."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from . import options
from .session import hush, policy_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_ABOUT = """\
What a policy costs on a model: bytes of state per sequence, and how many sequences fit into a given memory, against a
full cache. Only the model's configuration is read, not its weights.
"""
_MORE = """\
examples:
  msrnn info tova:512
  msrnn info meta-llama/Llama-3.1-8B tova:1/8 --length 32768 --memory 24GiB
  msrnn info Qwen/Qwen3-0.6B h2o:256 --dtype bfloat16 --json
"""


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("info", help="what a policy costs on a model", description=_ABOUT, epilog=_MORE)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a hub name, a folder or a .gguf file (default: the bundled SmolLM2-135M-Instruct, fetched once)",
    )
    parser.add_argument("policy", metavar="POLICY", help="e.g. tova:512, window+4:1/8, h2o:2GiB, full")
    options.add_policy(parser, option=False)
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory for weights and states, e.g. 16GiB: gives the largest batches"
    )
    options.add_model(parser, option=False, weights=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    options.check_policy(arguments)
    hush()
    from ..hf import load as models

    origin = {"trust_remote_code": arguments.trust_remote_code, "revision": arguments.revision}
    facts = _facts(arguments, models.config(arguments.model, **origin))
    if arguments.json:
        print(json.dumps(facts))
        return
    _show(facts)


def _facts(arguments: Namespace, config: PreTrainedConfig) -> dict[str, Any]:
    from ..core.slots import slots
    from ..hf.cache import geometry, text_config
    from ..hf.cost import cost, parse_bytes
    from ..policy import plan

    layers = geometry(config)
    dtype = _dtype(arguments.dtype, config)
    context = getattr(text_config(config), "max_position_embeddings", None)
    length = arguments.length or context
    if length is None:
        raise ValueError("this model does not say how long its context is; give --length N")
    slot = sum(layer.slot_bytes(dtype) for layer in layers)
    made = plan(policy_of(arguments), len(layers), length=length, slot_bytes=slot)
    price = cost(layers, made, dtype, length)
    facts: dict[str, Any] = {
        "model": str(config.name_or_path),
        "policy": str(made),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "length": length,
        "slots": [slots(policy, layer.window) for policy, layer in zip(made.policies, layers, strict=True)],
        "windows": [layer.window for layer in layers],
        "state_bytes": price.state,
        "full_bytes": price.full,
        "token_bytes": price.slot,
        "ratio": round(price.full / price.state, 3),
        "weight_bytes": _weights(config, dtype, arguments.trust_remote_code),
    }
    if arguments.memory is not None:
        memory = parse_bytes(arguments.memory)
        bounded, full = price.largest_batch(max(0, memory - (facts["weight_bytes"] or 0)))
        facts |= {"memory_bytes": memory, "batch": bounded, "full_batch": full}
    return facts


def _dtype(asked: str, config: PreTrainedConfig) -> torch.dtype:
    import torch

    found = getattr(config, "dtype", None) if asked == "auto" else asked
    chosen = getattr(torch, found.removeprefix("torch.")) if isinstance(found, str) else found
    return chosen if isinstance(chosen, torch.dtype) else torch.float32


def _weights(config: PreTrainedConfig, dtype: torch.dtype, trust: bool) -> int | None:
    """Bytes of the weights, counted on a model without any; None where it cannot be built so."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except (ValueError, RuntimeError, ImportError, AttributeError, NotImplementedError):
        return None
    return int(empty.num_parameters()) * dtype.itemsize


def _show(facts: dict[str, Any]) -> None:
    from ..hf.cost import human

    weights = facts["weight_bytes"]
    rows = {
        "model": f"{facts['model']} ({facts['dtype']}, {len(facts['slots'])} layers with a state)",
        "policy": facts["policy"],
        "length": f"{facts['length']:,} tokens",
        "state": f"{human(facts['state_bytes'])} per sequence; slots per layer: {_runs(facts['slots'])}",
        "full cache": f"{human(facts['full_bytes'])} per sequence; {facts['ratio']:.2f} times the state",
        "one token": human(facts["token_bytes"]),
        "weights": "unknown" if weights is None else human(weights),
    }
    if "memory_bytes" in facts:
        sizes = f"{facts['batch']:,} sequences, {facts['full_batch']:,} with a full cache"
        rows["batch"] = f"{sizes}, in {human(facts['memory_bytes'])} less the weights (activations not counted)"
    for name, text in rows.items():
        print(f"{name:<11} {text}")


def _runs(slots: list[int | None]) -> str:
    """513 x 30, or 513, 64 x 2, 513: equal neighbours are told once."""
    told: list[tuple[int | None, int]] = []
    for size in slots:
        count = told.pop()[1] if told and told[-1][0] == size else 0
        told.append((size, count + 1))
    names = ((("all tokens" if size is None else f"{size:,}"), count) for size, count in told)
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in names)
