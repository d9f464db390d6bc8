"""`msrnn serve`: vLLM's OpenAI server with a bounded state for every request."""

from __future__ import annotations

import argparse
import json
import os
from argparse import Namespace
from importlib.util import find_spec
from typing import Any

from ..plan import Plan
from ..system.console import note
from ..system.extras import install
from . import options
from .argument_parser import Commands, Parser
from .server_process import run_server
from .session import config_dtype, policy_text, silence_transformers
from .vllm_options import VllmOptions, vllm_length

_ABOUT = """\
Serve a model over HTTP with vLLM, every request in a state of fixed size: as many run at once as states fit into the
memory, whatever the length of their texts. Before it starts, it says what a request takes. Any option of `vllm serve`
may follow; those that a bounded state cannot support are refused by name. Needs `pip install ".[vllm]"` in a clone of
msrnn.
"""
_EXAMPLES = """\
examples:
  msrnn serve meta-llama/Llama-3.1-8B-Instruct --policy tova:1024 --port 8000
  msrnn serve Qwen/Qwen3-8B --policy h2o:512 --tensor-parallel-size 2 --kv-cache-memory-bytes 8G
  msrnn serve ./model --policy tova --profile profile.json --max-model-len 32768
  msrnn serve ./model --policy tova:512 --prefix system=system.state    # made by msrnn state build
"""
_LOOPBACK = "127.0.0.1"
_LEARNED_SINKS = ("gpt_oss",)  # types of models with a logit per head for attention to nothing
_PIECE = 512  # tokens that a batch takes of a long prompt on a GPU, if there are other requests
_POOL = 4 << 30  # bytes of host memory for states of earlier prompts, if there are 8 times as many


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP with vLLM", description=_ABOUT, epilog=_EXAMPLES
    )
    options.add_policy(parser)
    _add_prefix(parser)
    parser.add_argument("model", metavar="MODEL", help="a hub name or a folder, as vLLM takes it")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of `vllm serve`")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    rest = _parse_own_options(arguments)
    options.check_policy(arguments)
    if find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed here; {install('vllm')}")
    from ..vllm import plugin, settings

    plugin.check_version(plugin.vllm_version())
    plugin.check_entry_point()
    vllm_options = VllmOptions(rest)
    vllm_options.refuse_unsupported()
    silence_transformers()
    plan, state_bytes = _announce_cost(arguments, vllm_options)
    prefixes = _connector_options(arguments, vllm_options, plan, state_bytes)
    pieces = _piece_options(vllm_options, plugin.vllm_version())
    host = _host_options(vllm_options)
    command = [arguments.model, *rest, *prefixes, *pieces, *_worker_options(vllm_options), *host]
    raise SystemExit(run_server(command, settings.write(plan), vllm_options.shutdown))


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        action="append",
        metavar="NAME=FILE",
        help="a state saved by msrnn state build: requests whose prompt begins with its text start from it; repeatable",
    )
    parser.add_argument(
        "--prefix-pool",
        metavar="SIZE",
        help="host memory for states of earlier prompts, so that requests with the same beginning do not read it "
        "again; 0 turns it off (default: 4GiB, or an eighth of the memory if less, on a CPU; 0 on a GPU, where it "
        "slows prompts that share nothing)",
    )


def _connector_options(arguments: Namespace, vllm_options: VllmOptions, plan: Plan, state_bytes: int) -> list[str]:
    """The options that tell vLLM's processes which states requests may start from: files, and the pool."""
    from ..vllm.pool import SCHEDULER, STATES
    from ..vllm.prefix import CONNECTOR, FILES

    files = _prefix_files(arguments, vllm_options, plan)
    states = _pool_states(arguments.prefix_pool, state_bytes)
    if not files and not states:
        return []
    connector = CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": {FILES: files, STATES: states}}
    scheduler = ["--scheduler-cls", SCHEDULER] if vllm_options.parsed.scheduler_cls is None else []
    return ["--kv-transfer-config", json.dumps(connector), *scheduler]


def _pool_states(size: str | None, state_bytes: int) -> int:
    """How many states of earlier prompts are kept."""
    from ..system.sizes import human, parse_bytes

    available = _default_pool() if size is None else parse_bytes(size)
    states = int(available // state_bytes)
    if size is not None and available and not states:
        raise ValueError(f"--prefix-pool {size} is less than one state, {human(state_bytes)}; give more, or 0 for none")
    if states:
        note(f"prefix pool: {human(states * state_bytes)} of host memory keep {states:,} states of earlier prompts")
    return states


def _default_pool() -> int:
    """Bytes of the pool where none are given. On a GPU it has to be asked for: it costs prompts that share nothing."""
    import torch

    from ..system.memory import usable

    return 0 if torch.cuda.is_available() else min(_POOL, usable() // 8)


def _prefix_files(arguments: Namespace, vllm_options: VllmOptions, plan: Plan) -> dict[str, str]:
    """The prefix files by name, after a check that they fit the model and the plan."""
    if not arguments.prefix:
        return {}
    from ..hf.load import config
    from ..vllm.prefix import Prefix

    parsed = vllm_options.parsed
    files: dict[str, str] = {}
    for text in arguments.prefix:
        name, equals, file = text.partition("=")
        if not (name and equals and file) or name in files:
            raise ValueError(f"--prefix {text!r}: write NAME=FILE, every name once")
        files[name] = os.path.abspath(file)
    origin = {"revision": parsed.revision, "trust_remote_code": parsed.trust_remote_code}
    dtype = _dtype(parsed.dtype, config(arguments.model, **origin))
    for name, file in files.items():
        prefix = Prefix.read(name, file)
        prefix.check(arguments.model, parsed.revision, dtype, [str(policy) for policy in plan.policies])
        note(f"prefix {name}: {len(prefix.tokens):,} tokens that no request has to read")
    return files


def _host_options(vllm_options: VllmOptions) -> list[str]:
    """Only this machine can reach the server unless the user says otherwise; a note says who can, and with what."""
    parsed = vllm_options.parsed
    if parsed.uds:
        note(f"listens on the socket {parsed.uds}: whoever may open that file can use it")
        return []
    where = f"listens on {parsed.host or _LOOPBACK}:{parsed.port}"
    keys = any(parsed.api_key or [os.environ.get("VLLM_API_KEY")])
    if parsed.host in (None, "localhost", "::1") or parsed.host.startswith("127."):
        note(f"{where}: only this machine can reach it; --host 0.0.0.0 opens it to others")
    elif keys:
        note(f"{where}: others can reach it and need the key, but not for /metrics, /health and paths outside /v1")
    else:
        note(f"{where}: everyone who can reach this machine can use it; --api-key KEY asks for a key")
    return [] if parsed.host else ["--host", _LOOPBACK]


def _parse_own_options(arguments: Namespace) -> list[str]:
    """Add msrnn's options that stand among vLLM's to those before MODEL; what is left are vLLM's."""
    parser = Parser(prog="msrnn serve", add_help=False)
    options.add_policy(parser)
    _add_prefix(parser)
    return parser.parse_known_args(arguments.rest, arguments)[1]


def _piece_options(vllm_options: VllmOptions, version: str) -> list[str]:
    """On a GPU a batch takes a piece of each of many prompts, not few prompts whole, unless the user says otherwise.

    Many prompts are read together in little more than the time of one. A size of the user's own is a limit, as it is
    to vLLM: it grows for few prompts only if they say so.
    """
    import torch

    parsed = vllm_options.parsed
    if parsed.long_prefill_token_threshold or parsed.no_enable_chunked_prefill or not torch.cuda.is_available():
        return []
    length = vllm_length(parsed.max_model_len) or _PIECE
    options = ["--long-prefill-token-threshold", str(min(_PIECE, length))]
    grows = not version.startswith(("0.30.", "0.31."))  # they cannot give few prompts larger pieces
    said = parsed.long_prefill_token_threshold_adaptive is not None
    return options if said or not grows else [*options, "--long-prefill-token-threshold-adaptive"]


def _worker_options(vllm_options: VllmOptions) -> list[str]:
    """On a GPU a worker that reads a long prompt in pieces side by side, unless the user has one of their own."""
    import torch

    from ..vllm.lane_count import WORKER

    own = vllm_options.parsed.worker_cls is not None
    return [] if own or not torch.cuda.is_available() else ["--worker-cls", WORKER]


def _announce_cost(arguments: Namespace, vllm_options: VllmOptions) -> tuple[Plan, int]:
    """Note what a request takes and how many fit; the plan, with capacities as numbers, and the bytes of a state."""
    from ..hf import load as models
    from ..hf.geometry import geometry, text_config
    from ..system.sizes import human
    from ..vllm.cost import price

    parsed, memory = vllm_options.parsed, vllm_options.memory
    config = models.config(arguments.model, revision=parsed.revision, trust_remote_code=parsed.trust_remote_code)
    dtype = _dtype(parsed.dtype, config)
    vllm_options.check_cache_dtype(dtype)
    context = getattr(text_config(config), "max_position_embeddings", None)
    length = vllm_length(parsed.max_model_len) or arguments.length or context
    if length is None:
        raise ValueError("this model does not say how long its context is; give --max-model-len N")
    plan = _plan(arguments, vllm_options, config, dtype, arguments.length or length)
    state, full = price(geometry(config), plan, dtype, length)
    at_length = f"a full cache {human(full)} at {length:,} tokens"
    note(f"{plan}: a request takes {human(state)}, whatever its length; {at_length}")
    available = memory or 1 << 30
    name = "each GiB" if memory is None else human(available)
    requests = f"{available // state:,} requests at once; a full cache {available // full:,} of that length"
    note(f"{name} of KV memory holds {requests}")
    return plan, state


def _plan(arguments: Namespace, vllm_options: VllmOptions, config: Any, dtype: Any, length: int) -> Plan:
    """One policy per layer for texts of `length`, after a check that model and processes can have it."""
    from ..budgets.profile import plan_for
    from ..hf.best import resolve
    from ..hf.geometry import check_soft_cap, geometry, text_config
    from ..vllm.refusals import check_policy, check_sinks

    layers, revision, processes = geometry(config), vllm_options.parsed.revision, vllm_options.processes
    policy = resolve(policy_text(arguments), config, dtype=dtype, length=length, revision=revision)
    plan = plan_for(policy, len(layers), length=length)
    check_soft_cap(config, plan)
    sinks = text_config(config).model_type in _LEARNED_SINKS
    for layer, own in zip(layers, plan.policies, strict=True):
        check_policy(own, layer.kv_heads, processes)
        if sinks:
            check_sinks(own, layer.window, processes)
    return plan


def _dtype(option: str | None, config: Any) -> Any:
    """As vLLM chooses: by default it serves float32 weights in half precision."""
    import torch

    if option is None or option == "auto":
        dtype = config_dtype(config)
        return torch.bfloat16 if dtype in (None, torch.float32) else dtype
    dtype = getattr(torch, option, None)  # torch has vLLM's half and float too
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"--dtype {option!r} is unknown; use auto, half, float16, bfloat16, float or float32")
    return dtype
