"""The hot operations, chosen here and nowhere else: plain PyTorch, Numba on a CPU, Triton on a GPU.

Every operation has a twin in `kernels/torch` with the same name and arguments, which says what it means.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch as pytorch
from torch import Tensor

from ..core.attention import Attention
from ..core.slots import Columns, Slots
from ..core.units import UnitPolicies
from ..policy import KV, Policy
from .torch import compact as torch_compact
from .torch import encode as torch_encode
from .torch import mask as torch_mask
from .torch import rule_graph
from .torch import scan as torch_scan
from .torch import step as torch_step
from .torch.scan import Scan

if TYPE_CHECKING:
    from ..core.workspace import Workspace
    from .numba.chunk import Chunks

__all__ = [
    "Scan",
    "compact",
    "compiled",
    "compiling_only",
    "concurrent_scans",
    "decision_stream",
    "decode",
    "encode",
    "fast_chunks",
    "mask",
    "mask_exponentials",
    "scan",
    "step",
    "step_heads",
    "takes_exponentials",
]

mask = torch_mask.mask


def compiled(device: str) -> bool:
    """Whether a kind of device has compiled operations here; MSRNN_OPS=eager asks for plain PyTorch everywhere."""
    choice = os.environ.get("MSRNN_OPS", "auto")
    if choice not in ("auto", "eager", "compiled"):
        raise ValueError(f"MSRNN_OPS is {choice!r}; allowed: auto, eager, compiled")
    package = {"cpu": "numba", "cuda": "triton"}.get(device)
    able = package is not None and _installed(package)
    if choice == "compiled" and not able:
        advice = f"install {package}" if package else "it has plain PyTorch only"
        raise RuntimeError(f"MSRNN_OPS=compiled, but there is no compiled scan for {device} here: {advice}")
    return able and choice != "eager"


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def takes_exponentials(device: str, policy: Policy) -> bool:
    """Whether the scan for a kind of device can start from exponentials."""
    return device == "cpu" and policy.runs_everywhere and not isinstance(policy, UnitPolicies) and compiled(device)


def scan(
    logits: Tensor,
    columns: Columns,
    steps: Tensor,
    policy: Policy,
    attention: Attention,
    exponentials: bool = False,
) -> Scan:
    """A chunk's evictions and attention weights; see `kernels/torch/scan.py`.

    Where `takes_exponentials`, `logits` may hold their exponentials, which are overwritten. `OutOfRange` is raised if
    they overflowed or vanished: then call again with the logits themselves.
    """
    device = logits.device.type
    if policy.rule is not None and device == "cuda" and compiled(device):
        return rule_graph.scan(logits, columns, steps, policy, attention)
    by_unit = device == "cpu" and isinstance(policy, UnitPolicies)
    if policy.rule is not None or by_unit or not compiled(device):
        return torch_scan.scan(logits, columns, steps, policy, attention)
    if device == "cuda":
        from .triton import scan as triton_scan

        return triton_scan.scan(logits, columns, steps, policy, attention)
    from .numba import scan as numba_scan

    return numba_scan.scan(logits, columns, steps, policy, attention, exponentials)


def step(
    slots: Slots,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policy: Policy,
    attention: Attention,
    out: Tensor | None = None,
) -> Tensor:
    """One token of every row, in place; see `kernels/torch/step.py`. The output goes to `out` if given."""
    device = query.device.type
    if device not in ("cpu", "cuda") or policy.rule is not None or attention.sharded or not compiled(device):
        output = torch_step.step(slots, query, key, value, policy, attention)
        return output if out is None else out.copy_(output)
    if device == "cpu":
        from .numba import step as numba_step

        return numba_step.step(slots, query, key, value, policy, attention, out)
    from .triton import step as triton_step

    return triton_step.step(slots, query, key, value, policy, attention, out)


def step_heads(
    slots: Sequence[Slots],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    policies: Sequence[Policy],
    attention: Attention,
    tables: dict[object, Any],
    out: Tensor | None = None,
) -> Tensor | None:
    """`step` for all KV heads of a layer at once, each with slots and a policy of its own; query [B, H, D] as there.

    None, and nothing done, where no kernel takes them all: then each head steps alone. `tables` lives as long as the
    slots and keeps what a kernel has worked out about them.
    """
    device = query.device.type
    if device not in ("cpu", "cuda") or attention.sharded or not compiled(device):
        return None
    if device == "cpu":
        from .numba import step as numba_step

        return numba_step.step_heads(slots, query, key, value, policies, attention, tables, out)
    from .triton import step as triton_step

    return triton_step.step_heads(slots, query, key, value, policies, attention, tables, out)


def encode(key: Tensor, value: Tensor, kv: KV, out: Sequence[Tensor] | None = None) -> tuple[Tensor, ...]:
    """Codes and scales of keys and values, and what they stand for; see `kernels/torch/encode.py`."""
    if key.is_cuda and compiled("cuda"):
        from .triton import encode as triton_encode

        return triton_encode.encode(key, value, kv, out)
    if key.device.type == "cpu" and compiled("cpu"):
        from .numba import encode as numba_encode

        return numba_encode.encode(key, value, kv, out)
    return torch_encode.encode(key, value, kv, out)


def decode(codes: Sequence[Tensor], kv: KV, out: tuple[Tensor, Tensor]) -> None:
    """What codes and scales stand for; see `kernels/torch/encode.py`."""
    if out[0].is_cuda and compiled("cuda"):
        from .triton import encode as triton_encode

        triton_encode.decode(codes, kv, out)
    else:
        torch_encode.decode(codes, kv, out)


def mask_exponentials(
    weights: Tensor, positions: Tensor, expiry: Tensor, steps: Tensor, sinks: Tensor | None
) -> Tensor:
    """Exponentials of what is not visible become 0; see `kernels/torch/mask.py`."""
    if weights.device.type == "cpu" and compiled("cpu"):
        from .numba import mask as numba_mask

        return numba_mask.mask_exponentials(weights, positions, expiry, steps, sinks)
    return torch_mask.mask_exponentials(weights, positions, expiry, steps, sinks)


def compact(
    positions: Tensor, scores: Tensor | None, rows: tuple[Tensor, ...], expiry: Tensor, used: int, end: int
) -> None:
    """Close the gaps that a chunk's evictions left; see `kernels/torch/compact.py`."""
    device = positions.device.type
    if device == "cuda" and compiled(device):
        from .triton import compact as triton_compact

        triton_compact.compact(positions, scores, rows, expiry, used, end)
    elif device == "cpu" and compiled(device):
        from .numba import compact as numba_compact

        numba_compact.compact(positions, scores, rows, expiry, used, end)
    else:
        torch_compact.compact(positions, scores, rows, expiry, used, end)


def fast_chunks(
    space: Workspace,
    tokens: tuple[Tensor, Tensor, Tensor],
    steps: Tensor,
    policy: Policy,
    attention: Attention,
    output: Tensor,
) -> Chunks | None:
    """Chunks with little between their matmuls, where the device and the dtype have them (CPU, float32 and up)."""
    dtype, device = tokens[0].dtype, tokens[0].device.type
    if device != "cpu" or dtype not in (pytorch.float32, pytorch.float64) or space.slots.limit is None:
        return None
    if not policy.runs_everywhere or isinstance(policy, UnitPolicies) or attention.sharded or not compiled(device):
        return None
    from .numba.chunk import Chunks

    return Chunks(space, tokens, steps, policy, attention, output)


def concurrent_scans(count: int) -> AbstractContextManager[None]:
    """Inside this context so many scans are launched on streams of a GPU beside each other."""
    if not compiled("cuda"):
        return nullcontext()
    from .triton import concurrency

    return concurrency.concurrent_scans(count * concurrency.scan_count())


def compiling_only() -> AbstractContextManager[None]:
    """Inside this context kernels of a GPU are compiled and not launched."""
    if not compiled("cuda"):
        return nullcontext()
    from .triton import compilation

    return compilation.compiling_only()


def decision_stream(device: pytorch.device) -> AbstractContextManager[None]:
    """Inside this context a GPU chooses victims on a stream beside the model's; when it ends, all are chosen."""
    if device.type != "cuda" or not compiled("cuda"):
        return nullcontext()
    from .triton.notes import DecisionStream

    return DecisionStream(device)
