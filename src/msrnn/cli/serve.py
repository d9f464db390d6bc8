"""`msrnn serve`: vLLM's OpenAI server with a bounded state for every request."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from importlib.util import find_spec
from types import FrameType
from typing import Any

from ..system.console import note
from . import options
from .argument_parser import Commands, Parser
from .session import config_dtype, policy_text, silence_transformers

_ABOUT = """\
Serve a model over HTTP with vLLM, every request in a state of fixed size: as many run at once as states fit into the
memory, whatever the length of their texts. Before it starts, it says what a request takes. Any option of `vllm serve`
may follow; those that a bounded state cannot support are refused by name. Needs `pip install "msrnn[vllm]"`.
"""
_EXAMPLES = """\
examples:
  msrnn serve meta-llama/Llama-3.1-8B-Instruct --policy tova:1024 --port 8000
  msrnn serve Qwen/Qwen3-8B --policy h2o:512 --tensor-parallel-size 2 --kv-cache-memory-bytes 8G
  msrnn serve ./model --policy tova --profile profile.json --max-model-len 32768
  msrnn serve ./model --policy tova:512 --prefix system=system.state    # made by msrnn state build
"""
_SERVER = "vllm.entrypoints.openai.api_server"
_PIECE = 512  # tokens that a batch takes of a long prompt on a GPU, if there are other requests


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
    own, rest = _own_options(arguments.rest)
    for name, value in vars(own).items():
        if value is not None:
            setattr(arguments, name, value)
    options.check_policy(arguments)
    if find_spec("vllm") is None:
        raise ValueError('vLLM is not installed here; pip install "msrnn[vllm]"')
    from ..vllm import plugin, settings

    plugin.check_version(plugin.vllm_version())
    plugin.check_entry_point()
    vllm_options = VllmOptions(rest)
    vllm_options.refuse_unsupported()
    silence_transformers()
    plan = _announce_cost(arguments, vllm_options)
    prefixes = _prefix_options(arguments, vllm_options, plan)
    pieces = _piece_options(vllm_options, plugin.vllm_version())
    raise SystemExit(_serve([arguments.model, *rest, *prefixes, *pieces], settings.write(plan)))


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        action="append",
        metavar="NAME=FILE",
        help="requests whose prompt begins with what this state has read start from it (msrnn state build); repeatable",
    )


def _prefix_options(arguments: Namespace, vllm_options: VllmOptions, plan: Any) -> list[str]:
    """The option that names the prefixes to vLLM's workers, after a check that they fit the model and the plan."""
    if not arguments.prefix:
        return []
    from ..hf.load import config
    from ..vllm.prefix import CONNECTOR, FILES, Prefix

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
    connector = CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": {FILES: files}}
    return ["--kv-transfer-config", json.dumps(connector)]


def _own_options(rest: list[str]) -> tuple[Namespace, list[str]]:
    """msrnn's options, which may stand among vLLM's, and the rest."""
    parser = Parser(prog="msrnn serve", add_help=False)
    options.add_policy(parser)
    _add_prefix(parser)
    return parser.parse_known_args(rest)


def _piece_options(vllm_options: VllmOptions, version: str) -> list[str]:
    """On a GPU a batch takes a piece of each of many prompts, not few prompts whole, unless the user says otherwise.

    Many prompts are read together in little more than the time of one.
    """
    import torch

    parsed = vllm_options.parsed
    if parsed.long_prefill_token_threshold or parsed.no_enable_chunked_prefill or not torch.cuda.is_available():
        return []
    length = _vllm_length(parsed.max_model_len) or _PIECE
    options = ["--long-prefill-token-threshold", str(min(_PIECE, length))]
    grows = not version.startswith(("0.30.", "0.31."))  # they cannot give few prompts larger pieces
    return [*options, "--long-prefill-token-threshold-adaptive"] if grows else options


class VllmOptions:
    """Those of vLLM's options that msrnn must know; vLLM checks the rest."""

    def __init__(self, rest: list[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("dtype", "kv-cache-memory-bytes", "max-model-len", "revision", "kv-cache-dtype"):
            parser.add_argument(f"--{name}")
        for name in ("speculative-config", "kv-transfer-config", "speculative-model", "spec-method"):
            parser.add_argument(f"--{name}")
        for name in ("decode-context-parallel-size", "prefill-context-parallel-size", "attention-backend"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--long-prefill-token-threshold")
        parser.add_argument("--no-enable-chunked-prefill", action="store_true")
        parser.add_argument("--trust-remote-code", action="store_true")
        self.parsed = parser.parse_known_args([_with_dashes(option) for option in rest])[0]

    def refuse_unsupported(self) -> None:
        """Refuse options that a bounded state cannot support."""
        parsed = self.parsed
        if parsed.speculative_config or parsed.speculative_model or parsed.spec_method:
            raise ValueError(
                "speculative decoding takes tokens back, and a state cannot; leave --speculative-config out"
            )
        if parsed.kv_transfer_config:
            raise ValueError(
                "KV connectors move blocks of tokens, and a state is one block; leave --kv-transfer-config out"
            )
        if parsed.kv_cache_dtype not in (None, "auto", "float16", "bfloat16", "float32"):
            raise ValueError(
                f"--kv-cache-dtype {parsed.kv_cache_dtype}: quantised states are not supported; leave it out"
            )
        for name in ("decode", "prefill"):
            if getattr(parsed, f"{name}_context_parallel_size") not in (None, "1"):
                raise ValueError(
                    f"--{name}-context-parallel-size spreads a request's tokens over processes; use "
                    "--tensor-parallel-size or --pipeline-parallel-size"
                )
        if parsed.attention_backend not in (None, "CUSTOM", "CPU_ATTN"):
            raise ValueError(f"--attention-backend {parsed.attention_backend}: the backend is msrnn's; leave it out")

    @property
    def memory(self) -> int | None:
        """Bytes for states, where they are known before vLLM looks at the device."""
        if self.parsed.kv_cache_memory_bytes:
            return _vllm_bytes(self.parsed.kv_cache_memory_bytes)
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        return int(space) << 30 if space and space.isdigit() else None


def _with_dashes(option: str) -> str:
    """vLLM accepts --max_model_len for --max-model-len."""
    if not option.startswith("--"):
        return option
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _vllm_bytes(text: str) -> int:
    """As vLLM parses sizes: 25.6k, 2G (powers of ten), 2Gi (powers of two) or a number."""
    from ..system.sizes import parse_bytes

    size = text.strip()
    return parse_bytes(size if size[-1].isdigit() or size[-1] in "bB" else f"{size}B")


def _announce_cost(arguments: Namespace, vllm_options: VllmOptions) -> Any:
    """Note what a request takes and how many fit; the plan, with capacities as numbers."""
    from ..budgets.profile import plan_for
    from ..hf import load as models
    from ..hf.geometry import geometry, text_config
    from ..system.sizes import human
    from ..vllm.cost import price

    parsed = vllm_options.parsed
    config = models.config(arguments.model, revision=parsed.revision, trust_remote_code=parsed.trust_remote_code)
    dtype = _dtype(parsed.dtype, config)
    layers = geometry(config)
    context = getattr(text_config(config), "max_position_embeddings", None)
    length = _vllm_length(parsed.max_model_len) or arguments.length or context
    if length is None:
        raise ValueError("this model does not say how long its context is; give --max-model-len N")
    slot = sum(layer.slot_bytes(dtype) for layer in layers)
    policies = plan_for(policy_text(arguments), len(layers), length=arguments.length or length, slot_bytes=slot)
    state, full = price(layers, policies, dtype, length)
    at_length = f"a full cache {human(full)} at {length:,} tokens"
    note(f"{policies}: a request takes {human(state)}, whatever its length; {at_length}")
    available = vllm_options.memory or 1 << 30
    name = "each GiB" if vllm_options.memory is None else human(available)
    requests = f"{available // state:,} requests at once; a full cache {available // full:,} of that length"
    note(f"{name} of KV memory holds {requests}")
    return policies


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


def _vllm_length(text: str | None) -> int | None:
    """As vLLM parses lengths: 32k is 32000, 32K is 32768; -1 and auto leave it to vLLM."""
    if text is None or text in ("-1", "auto"):
        return None
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1], 1)
    try:
        return int(float(text.rstrip("kKmM")) * scale)
    except ValueError:
        raise ValueError(f"--max-model-len {text!r} is not a number") from None


def _serve(command: list[str], policy: str) -> int:
    """Run vLLM's server until it ends, and return its exit code; signals are passed on."""
    from ..vllm import POLICY

    with tempfile.TemporaryDirectory(prefix="msrnn-metrics-") as folder:
        environment = os.environ | {POLICY: policy, "PROMETHEUS_MULTIPROC_DIR": folder}
        model, *rest = command
        server = subprocess.Popen([sys.executable, "-m", _SERVER, "--model", model, *rest], env=environment)

        def forward_signal(number: int, _: FrameType | None) -> None:
            server.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward_signal)
        return server.wait()
