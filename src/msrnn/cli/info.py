"""`msrnn info`: what a policy costs on a model, without loading its weights."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..budgets.profile import shipped_profiles
from ..plan import HeadPolicies, LayerPolicy, parts
from ..policy import PRESETS
from . import options
from .argument_parser import Commands, size
from .session import config_dtype, policy_text, silence_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

_ABOUT = """\
What a policy costs on a model: bytes of state per sequence, and how many sequences fit into a given memory, against a
full cache. Only the model's configuration is read, not its weights.
"""
_EXAMPLES = f"""\
policies: best, {", ".join(PRESETS)} (docs/budgets.md)
profiles that ship: {", ".join(shipped_profiles())}

examples:
  msrnn info tova:512
  msrnn info best:256
  msrnn info meta-llama/Llama-3.1-8B tova:1/8 --length 32768 --memory 24GiB
  msrnn info Qwen/Qwen3-0.6B h2o:256 --dtype bfloat16 --json
"""


def add(commands: Commands) -> None:
    parser = commands.add_parser("info", help="what a policy costs on a model", description=_ABOUT, epilog=_EXAMPLES)
    options.add_model_argument(parser)
    parser.add_argument("policy", metavar="POLICY", help="e.g. best:256, tova:512, window+4:1/8, h2o:2GiB, full")
    options.add_policy(parser, option=False)
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="for weights and states, e.g. 16GiB: gives the largest batches"
    )
    options.add_model(parser, option=False, weights=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    options.check_policy(arguments)
    silence_transformers()
    from ..hf import load as models

    origin = {"trust_remote_code": arguments.trust_remote_code, "revision": arguments.revision}
    facts = _facts(arguments, models.config(arguments.model, **origin))
    print(json.dumps(facts) if arguments.json else _text(facts))


def _facts(arguments: Namespace, config: PreTrainedConfig) -> dict[str, Any]:
    """What --json prints."""
    from ..budgets.profile import plan_for
    from ..hf.best import resolution, resolve
    from ..hf.cost import cost
    from ..hf.geometry import geometry, text_config
    from ..policy import is_best

    layers, asked = geometry(config), policy_text(arguments)
    dtype = _dtype(arguments.dtype, config)
    context = getattr(text_config(config), "max_position_embeddings", None)
    length = arguments.length or context
    if length is None:
        raise ValueError("this model does not say how long its context is; give --length N")
    origin = {"dtype": dtype, "length": length, "revision": arguments.revision}
    best = resolution(asked, config, **origin) if is_best(asked) else None
    policies = plan_for(best.policy if best else resolve(asked, config, **origin), len(layers), length=length)
    predicted = cost(layers, policies, dtype, length)
    facts: dict[str, Any] = {
        "model": str(config.name_or_path),
        **({"asked": asked, "resolved": asdict(best)} if best else {}),
        "policy": str(policies),
        "dtype": str(dtype).removeprefix("torch."),
        "context": context,
        "length": length,
        "slots": [_slot_counts(policy, layer.window) for policy, layer in zip(policies.policies, layers, strict=True)],
        "windows": [layer.window for layer in layers],
        "state_bytes": predicted.state,
        "full_bytes": predicted.full,
        "token_bytes": predicted.slot,
        "ratio": round(predicted.full / predicted.state, 3),
        "weight_bytes": _weight_bytes(config, dtype, arguments.trust_remote_code),
    }
    if arguments.memory is not None:
        memory = arguments.memory
        bounded, full = predicted.largest_batch(max(0, memory - (facts["weight_bytes"] or 0)))
        facts |= {"memory_bytes": memory, "batch": bounded, "full_batch": full}
    return facts


def _slot_counts(policy: LayerPolicy, window: int | None) -> int | list[int | None] | None:
    """The slots of a layer, or of its KV heads where each has its own; None: it grows."""
    from ..core.slots import slot_count

    counts = [slot_count(part, window) for part in parts(policy)]
    return counts if isinstance(policy, HeadPolicies) else counts[0]


def _dtype(option: str, config: PreTrainedConfig) -> torch.dtype:
    """The dtype of --dtype; for auto the model's, or float32 where it names none."""
    import torch

    if option == "auto":
        return config_dtype(config) or torch.float32
    dtype: torch.dtype = getattr(torch, option)
    return dtype


def _weight_bytes(config: PreTrainedConfig, dtype: torch.dtype, trust: bool) -> int | None:
    """Bytes of the weights, counted on the meta device; None where the model cannot be built there."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except (ValueError, RuntimeError, ImportError, AttributeError, NotImplementedError):
        return None
    return int(model.num_parameters()) * dtype.itemsize


def _text(facts: dict[str, Any]) -> str:
    """The facts as lines for a person."""
    from ..system.sizes import human

    weights = facts["weight_bytes"]
    rows = {
        "model": f"{facts['model']} ({facts['dtype']}, {len(facts['slots'])} layers with a state)",
        "policy": facts["policy"],
        **_best_rows(facts),
        "length": f"{facts['length']:,} tokens",
        "state": f"{human(facts['state_bytes'])} per sequence; {_slots_in_words(facts['slots'])}",
        "full cache": f"{human(facts['full_bytes'])} per sequence; {facts['ratio']:.2f} times the state",
        "one token": human(facts["token_bytes"]),
        "weights": "unknown" if weights is None else human(weights),
    }
    if "memory_bytes" in facts:
        sizes = f"{facts['batch']:,} sequences, {facts['full_batch']:,} with a full cache"
        rows["batch"] = f"{sizes}, in {human(facts['memory_bytes'])} less the weights (activations not counted)"
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def _best_rows(facts: dict[str, Any]) -> dict[str, str]:
    """What `best` stands for here."""
    from ..system.sizes import human

    if "resolved" not in facts:
        return {}
    best = facts["resolved"]
    profile = best["profile"] or "none that msrnn comes with was made for this model, or for so few or so many slots"
    return {
        facts["asked"]: best["policy"],
        "slots": f"{best['slots']:,} per layer on average, {best['kv']}, in at most {human(best['limit_bytes'])}",
        "profile": profile,
    }


def _slots_in_words(slots: list[Any]) -> str:
    """The slots of every layer; by KV head, the range over all heads: a list of them would fill the screen."""
    if not isinstance(slots[0], list):
        return f"slots per layer: {_run_lengths(slots)}"
    sizes = sorted(size for heads in slots for size in heads)
    spread = f" to {sizes[-1]:,}, {fmean(sizes):,.0f} on average" if sizes[0] < sizes[-1] else ""
    return f"slots per KV head: {sizes[0]:,}{spread}"


def _run_lengths(slots: list[int | None]) -> str:
    """513 x 30, or 513, 64 x 2, 513: equal neighbours once, with their number."""
    runs = [("all tokens" if size is None else f"{size:,}", len(list(group))) for size, group in groupby(slots)]
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in runs)
