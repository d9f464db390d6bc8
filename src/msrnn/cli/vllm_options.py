"""vLLM's own options, as far as `msrnn serve` must know them: what they say, and which a state cannot support."""

from __future__ import annotations

import argparse
import os
import re
from string import digits
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHORT = {
    "-sc": "--speculative-config",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
}
_PART = re.compile(r"^(--?[a-z][\w-]*)\..*$")  # of an option whose value is JSON


class VllmOptions:
    """Those of vLLM's options that msrnn must know; vLLM checks the rest."""

    def __init__(self, rest: list[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("dtype", "kv-cache-memory-bytes", "max-model-len", "revision", "kv-cache-dtype"):
            parser.add_argument(f"--{name}")
        for name in ("speculative-model", "spec-model", "spec-method", "spec-tokens", "attention-backend"):
            parser.add_argument(f"--{name}")
        for name in ("kv-transfer-config", "kv-offloading-size"):
            parser.add_argument(f"--{name}")
        for name in _SHORT.values():
            parser.add_argument(name)
        parser.add_argument("--tensor-parallel-size", "-tp")
        parser.add_argument("--long-prefill-token-threshold")
        parser.add_argument("--long-prefill-token-threshold-adaptive", action=argparse.BooleanOptionalAction)
        parser.add_argument("--scheduler-cls")
        parser.add_argument("--worker-cls")
        for name in ("config", "host", "uds", "shutdown-timeout"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--port", default="8000")
        parser.add_argument("--api-key", nargs="*")
        parser.add_argument("--no-enable-chunked-prefill", "--disable-chunked-prefill", action="store_true")
        parser.add_argument("--trust-remote-code", action="store_true")
        options = [_with_dashes(option) for option in rest]
        file = parser.parse_known_args(options)[0].config
        self.parsed = parser.parse_known_args([*_file_options(file), *options])[0]

    def refuse_unsupported(self) -> None:
        """Refuse options that a bounded state cannot support."""
        parsed = self.parsed
        speculative = parsed.speculative_model, parsed.spec_model, parsed.spec_method, parsed.spec_tokens
        if parsed.speculative_config or any(speculative):
            raise ValueError(
                "speculative decoding takes tokens back, and a state cannot; leave --speculative-config out"
            )
        if parsed.kv_transfer_config:
            raise ValueError(
                "KV connectors move blocks of tokens, and a state is one block; leave --kv-transfer-config out"
            )
        if parsed.kv_offloading_size is not None:
            raise ValueError(
                f"--kv-offloading-size {parsed.kv_offloading_size}: it moves blocks of tokens to the host, and a state "
                "is one block; leave it out, or keep states of earlier prompts there with --prefix-pool SIZE"
            )
        for name in ("decode", "prefill"):
            if getattr(parsed, f"{name}_context_parallel_size") not in (None, "1"):
                raise ValueError(
                    f"--{name}-context-parallel-size spreads a request's tokens over processes; use "
                    "--tensor-parallel-size or --pipeline-parallel-size"
                )
        if parsed.attention_backend not in (None, "CUSTOM", "CPU_ATTN"):
            raise ValueError(f"--attention-backend {parsed.attention_backend}: the backend is msrnn's; leave it out")

    def check_cache_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a cache in another dtype than the model's: a state's bytes would be read as the wrong numbers."""
        option, own = self.parsed.kv_cache_dtype, str(dtype).removeprefix("torch.")
        if option not in (None, "auto", own):
            raise ValueError(
                f"--kv-cache-dtype {option}: states are stored in the model's dtype ({own}); leave it out, or use a "
                "policy with kv=int8 or kv=k8v4 for fewer bits"
            )

    @property
    def processes(self) -> int:
        """How many share the heads of a layer."""
        text = self.parsed.tensor_parallel_size or "1"
        return int(text) if text.isdigit() else 1  # vLLM itself refuses another

    @property
    def shutdown(self) -> int:
        """Seconds that vLLM gives requests under way after SIGTERM."""
        text = self.parsed.shutdown_timeout or "0"
        return int(text) if text.isdigit() else 0  # vLLM itself refuses another

    @property
    def memory(self) -> int | None:
        """Bytes for states, where they are known before vLLM looks at the device."""
        if self.parsed.kv_cache_memory_bytes is not None:
            return vllm_bytes(self.parsed.kv_cache_memory_bytes)
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        return int(space) << 30 if space and space.isdigit() else None


def _file_options(file: str | None) -> list[str]:
    """The options in vLLM's own configuration file; those of the command line go before them."""
    if file is None:
        return []
    import yaml  # type: ignore[import-untyped]

    with open(file) as text:
        try:
            options = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"--config {file}: not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(options, dict):
        raise ValueError(f"--config {file}: vLLM takes lines of `option: value`")
    names = [
        (_with_dashes(f"--no-{name}" if value is False else f"--{name}"), value) for name, value in options.items()
    ]
    return [text for name, value in names for text in ([name] if isinstance(value, bool) else [name, str(value)])]


def _with_dashes(option: str) -> str:
    """vLLM accepts --max_model_len for --max-model-len, and --speculative-config.method for a part of one."""
    name, equals, value = option.partition("=")
    name = _PART.sub(r"\1", name)
    name = name.replace("_", "-") if name.startswith("--") else _SHORT.get(name, name)
    return name + equals + value


def vllm_bytes(text: str) -> int:
    """As vLLM parses sizes: 25.6k, 2G (powers of ten), 2Gi (powers of two) or a number."""
    from ..system.sizes import parse_bytes

    size = text.strip()
    try:
        return parse_bytes(size if size.endswith((*digits, "b", "B")) else f"{size}B")
    except ValueError:
        raise ValueError(
            f"--kv-cache-memory-bytes {text!r} is not a size; write e.g. 8G, 8Gi or a number of bytes"
        ) from None


def vllm_length(text: str | None) -> int | None:
    """As vLLM parses lengths: 32k is 32000, 32K is 32768; -1 and auto leave it to vLLM."""
    if text is None or text in ("-1", "auto"):
        return None
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    try:
        return int(float(text.rstrip("kKmM")) * scale)
    except (ValueError, OverflowError):
        raise ValueError(f"--max-model-len {text!r} is not a number of tokens; write e.g. 32768 or 32k") from None
