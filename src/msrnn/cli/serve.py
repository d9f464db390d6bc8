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

from . import options
from .session import hush, note, policy_of

_ABOUT = """\
Serve a model over HTTP with vLLM, every request in a state of fixed size: as many run at once as states fit into the
memory, whatever the length of their texts. Before it starts, it says what a request takes. Any option of `vllm serve`
may follow; what a bounded state does not go with is refused by name. Needs `pip install "msrnn[vllm]"`.
"""
_MORE = """\
examples:
  msrnn serve meta-llama/Llama-3.1-8B-Instruct --policy tova:1024 --port 8000
  msrnn serve Qwen/Qwen3-8B --policy h2o:512 --tensor-parallel-size 2 --kv-cache-memory-bytes 8G
  msrnn serve ./model --policy tova --profile profile.json --max-model-len 32768
  msrnn serve ./model --policy tova:512 --prefix system=system.state    # made by msrnn state build
"""
_SERVER = "vllm.entrypoints.openai.api_server"


def add(commands: options.Commands[options.Parser]) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP with vLLM", description=_ABOUT, epilog=_MORE)
    options.add_policy(parser)
    _add_prefix(parser)
    parser.add_argument("model", metavar="MODEL", help="a hub name or a folder, as vLLM takes it")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of `vllm serve`")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> None:
    later, rest = _own_options(arguments.rest)
    for name, value in vars(later).items():
        if value is not None:
            setattr(arguments, name, value)
    options.check_policy(arguments)
    if find_spec("vllm") is None:
        raise ValueError('vLLM is not installed here; pip install "msrnn[vllm]"')
    from ..vllm import plugin, settings

    plugin.check_version(plugin.vllm_version())
    plugin.check_found()
    asked = VllmOptions(rest)
    asked.refuse()
    hush()
    plan = _announce(arguments, asked)
    prefixes = _prefixes(arguments, asked, plan)
    raise SystemExit(_serve([arguments.model, *rest, *prefixes], settings.write(plan)))


def _add_prefix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        action="append",
        metavar="NAME=FILE",
        help="requests whose prompt begins with what this state has read start from it (msrnn state build); repeatable",
    )


def _prefixes(arguments: Namespace, asked: VllmOptions, plan: Any) -> list[str]:
    """The option that tells vLLM's workers of the prefixes, once it is sure that they fit."""
    if not arguments.prefix:
        return []
    from ..hf.load import config
    from ..vllm.prefix import CONNECTOR, FILES, Prefix

    given = asked.given
    files: dict[str, str] = {}
    for text in arguments.prefix:
        name, equals, file = text.partition("=")
        if not (name and equals and file) or name in files:
            raise ValueError(f"--prefix {text!r}: write NAME=FILE, every name once")
        files[name] = os.path.abspath(file)
    dtype = _dtype(
        given.dtype, config(arguments.model, revision=given.revision, trust_remote_code=given.trust_remote_code)
    )
    for name, file in files.items():
        prefix = Prefix.read(name, file)
        prefix.check(arguments.model, given.revision, dtype, [str(policy) for policy in plan.policies])
        note(f"prefix {name}: {len(prefix.tokens):,} tokens that no request has to read")
    connector = CONNECTOR | {"kv_role": "kv_consumer", "kv_connector_extra_config": {FILES: files}}
    return ["--kv-transfer-config", json.dumps(connector)]


def _own_options(rest: list[str]) -> tuple[Namespace, list[str]]:
    """msrnn's options may stand among vLLM's."""
    parser = options.Parser(prog="msrnn serve", add_help=False)
    options.add_policy(parser)
    _add_prefix(parser)
    return parser.parse_known_args(rest)


class VllmOptions:
    """What msrnn must know of vLLM's options; the rest is vLLM's business."""

    def __init__(self, rest: list[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("dtype", "kv-cache-memory-bytes", "max-model-len", "revision", "kv-cache-dtype"):
            parser.add_argument(f"--{name}")
        for name in ("speculative-config", "kv-transfer-config", "speculative-model", "spec-method"):
            parser.add_argument(f"--{name}")
        for name in ("decode-context-parallel-size", "prefill-context-parallel-size", "attention-backend"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--trust-remote-code", action="store_true")
        dashed = [_dashed(option) for option in rest]
        self.given = parser.parse_known_args(dashed)[0]

    def refuse(self) -> None:
        given = self.given
        if given.speculative_config or given.speculative_model or given.spec_method:
            raise ValueError(
                "speculative decoding takes tokens back, and a state cannot; leave --speculative-config out"
            )
        if given.kv_transfer_config:
            raise ValueError(
                "KV connectors move blocks of tokens, and a state is one block; leave --kv-transfer-config out"
            )
        if given.kv_cache_dtype not in (None, "auto", "float16", "bfloat16", "float32"):
            raise ValueError(
                f"--kv-cache-dtype {given.kv_cache_dtype}: quantised states are not supported; leave it out"
            )
        for name in ("decode", "prefill"):
            if getattr(given, f"{name}_context_parallel_size") not in (None, "1"):
                raise ValueError(
                    f"--{name}-context-parallel-size spreads a request's tokens over processes; use "
                    "--tensor-parallel-size or --pipeline-parallel-size"
                )
        if given.attention_backend not in (None, "CUSTOM", "CPU_ATTN"):
            raise ValueError(f"--attention-backend {given.attention_backend}: the backend is msrnn's; leave it out")

    @property
    def memory(self) -> int | None:
        """Bytes for states, where they are known before vLLM looks at the device."""
        if self.given.kv_cache_memory_bytes:
            return _bytes(self.given.kv_cache_memory_bytes)
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        return int(space) << 30 if space and space.isdigit() else None


def _dashed(option: str) -> str:
    """vLLM takes --max_model_len for --max-model-len."""
    if not option.startswith("--"):
        return option
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _bytes(text: str) -> int:
    """As vLLM reads sizes: 25.6k, 2G (powers of ten), 2Gi (powers of two) or a number."""
    from ..hf.cost import parse_bytes

    sized = text.strip()
    return parse_bytes(sized if sized[-1].isdigit() or sized[-1] in "bB" else f"{sized}B")


def _announce(arguments: Namespace, asked: VllmOptions) -> Any:
    """What a request takes, and how many fit; the plan, in numbers that need no model any more."""
    from ..hf import load as models
    from ..hf.cache import text_config
    from ..hf.cost import human
    from ..policy import plan
    from ..vllm.cost import layers_of, price

    given = asked.given
    config = models.config(arguments.model, revision=given.revision, trust_remote_code=given.trust_remote_code)
    dtype = _dtype(given.dtype, config)
    layers = layers_of(config)
    context = getattr(text_config(config), "max_position_embeddings", None)
    length = _length(given.max_model_len) or arguments.length or context
    if length is None:
        raise ValueError("this model does not say how long its context is; give --max-model-len N")
    slot = sum(layer.slot_bytes(dtype) for layer in layers)
    made = plan(policy_of(arguments), len(layers), length=arguments.length or length, slot_bytes=slot)
    state, full = price(layers, made, dtype, length)
    note(
        f"{made}: a request takes {human(state)}, whatever its length; a full cache {human(full)} at {length:,} tokens"
    )
    memory = asked.memory
    where = "each GiB" if memory is None else human(memory)
    room = memory or 1 << 30
    note(f"{where} of KV memory holds {room // state:,} requests at once; a full cache {room // full:,} of that length")
    return made


def _dtype(asked: str | None, config: Any) -> Any:
    """As vLLM chooses: of its own accord it serves float32 weights in half precision."""
    import torch

    if asked in (None, "auto"):
        own = getattr(config, "dtype", None)
        own = getattr(torch, own.removeprefix("torch."), None) if isinstance(own, str) else own
        return torch.bfloat16 if own in (None, torch.float32) else own
    chosen = getattr(torch, asked, None)  # torch knows vLLM's half and float too
    if not isinstance(chosen, torch.dtype):
        raise ValueError(f"--dtype {asked!r} is unknown; use auto, half, float16, bfloat16, float or float32")
    return chosen


def _length(text: str | None) -> int | None:
    """vLLM takes 32k and 32K too; -1 and auto leave it to vLLM."""
    if text is None or text in ("-1", "auto"):
        return None
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1], 1)
    try:
        return int(float(text.rstrip("kKmM")) * scale)
    except ValueError:
        raise ValueError(f"--max-model-len {text!r} is not a number") from None


def _serve(command: list[str], policy: str) -> int:
    """Run vLLM's server until it ends or is told to; its exit code."""
    from ..vllm import POLICY

    with tempfile.TemporaryDirectory(prefix="msrnn-metrics-") as folder:
        environment = os.environ | {POLICY: policy, "PROMETHEUS_MULTIPROC_DIR": folder}
        model, *rest = command
        server = subprocess.Popen([sys.executable, "-m", _SERVER, "--model", model, *rest], env=environment)

        def pass_on(number: int, _: FrameType | None) -> None:
            server.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        return server.wait()
