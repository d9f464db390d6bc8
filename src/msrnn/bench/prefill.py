"""Reading a prompt: the exact recurrence in chunks beside one pass of full attention, in time and in peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ..memory import Peak
from ..rnn import PIECE, RNN
from ..wavefront import LANES, Wavefront
from .measure import Record, clear, seconds, timed


def prompt(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    weight = model.get_input_embeddings().weight
    return torch.randint(0, weight.shape[0], (batch, length), device=weight.device)


@torch.no_grad()
def bounded(
    model: PreTrainedModel, policy: str, batch: int, length: int, *, chunk: int, runs: int = 3, piece: int = PIECE
) -> Record:
    """The prompt through the recurrence, piece by piece, as the engine reads it."""
    ids, rnn = prompt(model, batch, length), RNN(model, policy, chunk=chunk, piece=piece)

    def read() -> None:
        state = rnn.start()
        for part in torch.split(ids, piece, 1):
            _, state = rnn.step(part, state)

    return _measured(read, ids, runs) | {"policy": policy, "chunk": chunk, "piece": piece}


def exact(model: PreTrainedModel, policy: str, batch: int, length: int, *, chunk: int, runs: int = 3) -> Record:
    """The prompt through the recurrence as the engine reads it here: in a wavefront where that pays."""
    rnn = RNN(model, policy, chunk=chunk)
    bounded_only = all(each.capacity is not None for each in rnn.plan.policies)
    if rnn.device.type == "cuda" and batch == 1 and bounded_only and Wavefront(rnn).fits(batch, length):
        return wavefront(model, policy, batch, length, chunk=chunk, lanes=LANES, runs=runs)
    return bounded(model, policy, batch, length, chunk=chunk, runs=runs)


@torch.no_grad()
def wavefront(
    model: PreTrainedModel, policy: str, batch: int, length: int, *, chunk: int, lanes: int, runs: int = 3
) -> Record:
    """As `bounded`, with several chunks under way at once and a CUDA graph for each round of them."""
    ids, front = prompt(model, batch, length), Wavefront(RNN(model, policy, chunk=chunk), batch, lanes)
    front.read(ids)  # captured here
    return _measured(lambda: front.read(ids), ids, runs) | {"policy": policy, "chunk": chunk, "lanes": lanes}


@torch.no_grad()
def full(model: PreTrainedModel, batch: int, length: int, *, runs: int = 3, backend: str = "flash") -> Record:
    """One pass of the plain model over the whole prompt, no cache kept, logits of the last token only."""
    ids = prompt(model, batch, length)

    def read() -> None:
        with _backend(backend):
            model(ids, use_cache=False, logits_to_keep=1)

    return _measured(read, ids, runs) | {"policy": "full", "backend": backend}


def fastest_full(
    model: PreTrainedModel, batch: int, length: int, *, runs: int = 3, backends: Sequence[str] = ("flash", "cudnn")
) -> Record | None:
    """The opponent: the fastest of PyTorch's attentions here; None where none of them can."""
    device = model.get_input_embeddings().weight.device
    found: list[Record] = []
    told: dict[str, float | str] = {}
    for backend in backends if device.type == "cuda" else ("any",):
        try:
            found.append(full(model, batch, length, runs=runs, backend=backend))
            told[backend] = found[-1]["median_s"]
        except (MemoryError, RuntimeError) as error:  # out of memory, or no such attention here
            told[backend] = str(error)[:100]
        finally:
            clear(device)
    return min(found, key=lambda record: float(record["median_s"])) | {"all_backends": told} if found else None


def _backend(name: str) -> AbstractContextManager[None]:
    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return sdpa_kernel(chosen[name]) if name in chosen else nullcontext()


def _measured(read: Callable[[], object], ids: Tensor, runs: int) -> Record:
    batch, length = ids.shape
    with Peak(ids.device) as peak:
        read()
    found = timed(seconds(read, ids.device, runs, least=0))
    record: Record = {"kind": "prefill", "batch": batch, "length": length, "peak_bytes": peak.bytes}
    return record | found | {"tokens_per_s": batch * length / found["median_s"]}
