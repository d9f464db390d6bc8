"""Batch generation with static buffers: one step for all rows, as one CUDA graph where there is a GPU.

Prompts are read by the recurrence in chunks, a few at a time, and their states go into rows of the batch; every step
writes one token to each row, sampling included. A row that ends is given to the next request without a new capture.
The device decides by itself which rows have ended, so the host stays one step behind and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.recurrence import CHUNK
from ..hf.cache import BoundedCache
from ..kernels.step import side
from ..policy import PolicyLike
from ..rnn import PIECE, RNN
from .compiled import fused
from .pipeline import CHUNK as CHUNK_IN_WAVE
from .pipeline import Wavefront
from .projections import Joined
from .sampling import pick
from .static_cache import Reading, StaticCache

TOGETHER = 32  # prompts that are read at once
FEW = 2  # so many long ones are sooner read one by one in a wavefront than at once
LONG = 49152  # tokens of a prompt from which on it pays to capture the graphs of the wavefront for it alone
GPU_CHUNK = 256
_STOPS = 16  # end tokens a request may have


@dataclass(frozen=True)
class Request:
    """A prompt's token ids and how to go on from it. `stops`: end tokens, the model's own if None.

    With a `temperature` above 0 tokens are drawn, the same again for a `seed`: from the `top_k` likeliest (None: all),
    and of these from the likeliest of total `top_p`. `on_token` is called with each new token as it comes, `on_read`
    with the number of the prompt's tokens that have just been read.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stops: Sequence[int] | None = None
    on_token: Callable[[int], None] | None = None
    on_read: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie above 0 and at most at 1")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or None for all tokens")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be a whole number from 0 up, below 2**63")
        if len(self.stops or ()) > _STOPS:
            raise ValueError(f"{len(self.stops or ())} end tokens were given; the engine takes {_STOPS} at most")


@dataclass(frozen=True)
class Finished:
    """What a request came to; `index` is its place among the requests, the end token is among the tokens."""

    index: int
    request: Request
    tokens: list[int]
    reason: Literal["stop", "length"]


@dataclass
class _Job:
    index: int
    request: Request
    stops: list[int]
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int) -> Finished | None:
        self.tokens.append(token)
        if self.request.on_token is not None:
            self.request.on_token(token)
        stopped = token in self.stops
        if not stopped and len(self.tokens) < self.request.max_new_tokens:
            return None
        return Finished(self.index, self.request, self.tokens, "stop" if stopped else "length")


class _Rows:
    """What the device knows of every row beside its state: all [B], `stops` [B, n]."""

    def __init__(self, batch: int, device: torch.device) -> None:
        def whole(*shape: int, value: int = 0) -> Tensor:
            return torch.full((batch, *shape), value, dtype=torch.int64, device=device)

        self.token, self.left, self.seed, self.count, self.top_k = (whole() for _ in range(5))
        self.emitted, self.stops = whole(value=-1), whole(_STOPS, value=-1)
        self.temperature, self.top_p = (torch.full((batch,), value, device=device) for value in (0.0, 1.0))

    def put(self, rows: Tensor, jobs: list[_Job]) -> None:
        """Requests whose first token is known go into these rows."""
        padded = [[*job.stops, *[-1] * (_STOPS - len(job.stops))] for job in jobs]
        asked = [job.request for job in jobs]
        values: dict[str, list[Any]] = {
            "token": [job.tokens[-1] for job in jobs],
            "left": [request.max_new_tokens - 1 for request in asked],
            "count": [1 for _ in asked],
            "stops": padded,
        }
        for name, value in (values | _sampling(asked)).items():
            mine = getattr(self, name)
            mine.index_copy_(0, rows, torch.tensor(value, dtype=mine.dtype, device=mine.device))


def _sampling(requests: list[Request]) -> dict[str, list[Any]]:
    return {
        "temperature": [request.temperature for request in requests],
        "top_k": [request.top_k or 0 for request in requests],
        "top_p": [request.top_p for request in requests],
        "seed": [request.seed for request in requests],
    }


class Engine:
    """A model, a policy and a batch of static rows. `length`: room per row where a layer keeps everything."""

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyLike,
        *,
        batch: int = 8,
        length: int | None = None,
        chunk: int | None = None,
        piece: int = PIECE,
        graphs: bool | None = None,
        compiled: bool = False,
        reading: Reading | None = None,
        wavefront: bool | None = None,
        joined: bool | None = None,
    ) -> None:
        """`graphs`: None means on a GPU. `compiled` lets torch.compile fuse what lies between the matmuls.

        `chunk`: tokens of a prompt whose evictions are one scan; None is what is fastest here. `reading`: how a full
        cache is read, see `FullLayer`; None is the fastest that is always right. `wavefront`: a long prompt that comes
        alone has several chunks under way at once; None means with graphs, from `LONG` tokens on. `joined`: matmuls
        that read the same input are one, their weights side by side; None means with graphs.
        """
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        self.model, self.batch = model, batch
        known = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        on_gpu = model.get_input_embeddings().weight.is_cuda
        fastest = GPU_CHUNK if on_gpu else CHUNK
        self.rnn = RNN(model, policy, length=length, chunk=fastest if chunk is None else chunk, piece=piece)
        endless = any(policy.capacity is None for policy in self.rnn.plan.policies)
        self.length = (length or known) if endless else None
        self.graphs = on_gpu if graphs is None else graphs
        if self.graphs and not on_gpu:
            raise ValueError(f"CUDA graphs need a GPU, and the model is on {self.rnn.device}; leave graphs out")
        self.joined = self.graphs if joined is None else joined
        self._weights = Joined(model) if self.joined else nullcontext()
        self._call = fused(self._forward) if compiled else self._forward
        self._captured: dict[bool, torch.cuda.CUDAGraph] = {}
        self._aside: torch.cuda.Stream | None = None
        _, state = self.rnn.step(torch.zeros(1, 1, dtype=torch.int64), self.rnn.start())
        self.cache = StaticCache(state.cache, batch, self.length, reading)
        self.rows, self._side = _Rows(batch, self.rnn.device), side(self.rnn.device)
        wavefront, self._long = (self.graphs, LONG) if wavefront is None else (wavefront, 0)
        self.front = None
        if wavefront and not endless:
            self.front = Wavefront(self.rnn, chunk=chunk or CHUNK_IN_WAVE, compiled=compiled, joined=self.joined)

    def generate(self, prompts: Iterable[Sequence[int]], **settings: Any) -> list[list[int]]:
        """The new tokens of every prompt, in order; `settings` are those of a Request."""
        done = sorted(self.run([Request(prompt, **settings) for prompt in prompts]), key=lambda each: each.index)
        return [each.tokens for each in done]

    @torch.no_grad()
    def run(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Requests as they end, taken in as rows become free."""
        waiting = (self._job(i, request) for i, request in enumerate(requests))
        jobs: dict[int, _Job] = {}
        self.cache.seen.fill_(-1)
        behind: list[_Emitted] = []
        while True:
            yield from self._admit(waiting, jobs)
            if not jobs:
                return
            sampled = any(job.request.temperature > 0 for job in jobs.values())
            behind.append(self._launch(sampled))
            if len(behind) > self.graphs:  # the host stays a step behind a GPU
                yield from _collect(behind.pop(0), jobs)

    def _job(self, index: int, request: Request) -> _Job:
        size = self.model.get_input_embeddings().weight.shape[0]
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= size:
            raise ValueError(f"request {index}: token ids run from {low} to {high}; the model knows 0 to {size - 1}")
        total = len(request.prompt) + request.max_new_tokens - 1
        if self.length is not None and total > self.length:
            raise ValueError(
                f"request {index} comes to {total} tokens, and this engine has room for {self.length}; "
                "give a larger length=, a shorter prompt or fewer max_new_tokens"
            )
        stops = self.model.generation_config.eos_token_id if request.stops is None else request.stops
        listed = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
        return _Job(index, request, listed)

    def _admit(self, waiting: Iterator[_Job], jobs: dict[int, _Job]) -> Iterator[Finished]:
        """Read prompts into rows until none is vacant or nobody waits."""
        while vacant := [row for row in range(self.batch) if row not in jobs][:TOGETHER]:
            new = list(islice(waiting, len(vacant)))
            if not new:
                return
            for group in self._groups(new):
                yield from self._begin(group, vacant, jobs)

    def _groups(self, new: list[_Job]) -> list[list[_Job]]:
        """Who is read together: all, but of a few those that a wavefront reads alone."""
        alone = [job for job in new if len(new) <= FEW and self._in_wavefront(len(job.request.prompt))]
        others = [job for job in new if job not in alone]
        return [*([job] for job in alone), *([others] if others else [])]

    def _in_wavefront(self, length: int) -> bool:
        if self.front is None or not self.front.fits(length):
            return False
        return bool(self.front.graphs) or length >= self._long

    def _begin(self, new: list[_Job], vacant: list[int], jobs: dict[int, _Job]) -> Iterator[Finished]:
        """Prompts go through the model into vacant rows; some requests end with their first token."""
        tokens, read = self._prefill(new)
        ended = [job.take(token) for job, token in zip(new, tokens, strict=True)]
        yield from (end for end in ended if end is not None)
        going = [i for i, end in enumerate(ended) if end is None]
        if going:
            rows = [vacant.pop(0) for _ in going]
            self._seat(rows, [new[i] for i in going], read, going)
            jobs.update(zip(rows, (new[i] for i in going), strict=True))

    def _seat(self, rows: list[int], jobs: list[_Job], read: BoundedCache, going: list[int]) -> None:
        """Row `going[i]` of what was read goes on in row `rows[i]` of the batch."""
        device = self.rnn.device
        if len(going) < len(next(read.bounded).state.seen):  # type: ignore[union-attr]
            read.batch_select_indices(torch.tensor(going, device=device))
        where = torch.tensor(rows, device=device)
        self.cache.load(where, read)
        self.rows.put(where, jobs)

    def _prefill(self, jobs: list[_Job]) -> tuple[list[int], BoundedCache]:
        """The first token of each, and the states after the prompts."""
        asked = [job.request for job in jobs]
        ids, real = _padded([request.prompt for request in asked], self.rnn.device)
        if self.front is not None and len(jobs) == 1 and self._in_wavefront(ids.shape[1]):
            logits, read = self.front.read(ids, asked[0].on_read)
        else:
            logits, read = self._read(ids, real, asked)
        how = {name: torch.tensor(value, device=logits.device) for name, value in _sampling(asked).items()}
        return pick(logits, **how, count=torch.zeros_like(how["seed"])).tolist(), read

    def _read(self, ids: Tensor, real: Tensor, asked: list[Request]) -> tuple[Tensor, BoundedCache]:
        """Prompts of any lengths together, piece by piece."""
        state, ragged, end = self.rnn.start(), not bool(real.all()), 0
        pieces = (torch.split(tensor, self.rnn.piece, 1) for tensor in (ids, real))
        for tokens, mask in zip(*pieces, strict=True):
            logits, state = self.rnn.step(tokens, state, mask if ragged else None)
            start, end = end, end + tokens.shape[1]
            _tell(asked, start, end, ids.shape[1])
        return logits, state.cache

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, vocabulary]: the logits after one token of every row."""
        logits: Tensor = self.model(
            input_ids=tokens[:, None], position_ids=positions[:, None], past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]

    @torch.no_grad()
    def _step(self, sampled: bool) -> None:
        """One token for every row that has not ended; of the others nothing changes."""
        rows, seen = self.rows, self.cache.seen
        active = seen >= 0
        self.cache.begin()
        with self._side, self._weights:
            logits = self._call(rows.token, seen.clamp(min=0))
        if sampled:
            token = pick(logits, rows.temperature, rows.top_k, rows.top_p, rows.seed, rows.count)
        else:
            token = logits.float().argmax(-1)
        rows.emitted.copy_(torch.where(active, token, -1))
        rows.token.copy_(torch.where(active, token, rows.token))
        rows.left.sub_(active.to(torch.int64))
        rows.count.add_(active.to(torch.int64))
        ended = (token[:, None] == rows.stops).any(1) | (rows.left <= 0)
        seen.copy_(torch.where(active & ~ended, seen + 1, -1))

    def _launch(self, sampled: bool) -> _Emitted:
        if not self.graphs:
            self._step(sampled)
            return _Emitted(self.rows.emitted.clone(), None)
        self.capture(sampled).replay()
        emitted = torch.empty(self.batch, dtype=torch.int64, pin_memory=True)
        emitted.copy_(self.rows.emitted, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _Emitted(emitted, event)

    @torch.no_grad()
    def capture(self, sampled: bool = False) -> torch.cuda.CUDAGraph:
        """The graph of a step, captured at first use with all rows idle, so that nothing of them changes."""
        if sampled not in self._captured:
            with self.cache.idle():
                self._captured[sampled] = self._capture(sampled)
        return self._captured[sampled]

    def _capture(self, sampled: bool) -> torch.cuda.CUDAGraph:
        """On a stream of this engine: who destroys a graph has PyTorch free the matmuls' workspace of its stream."""
        aside = self._aside = self._aside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # kernels are compiled and workspaces made before the capture
                self._step(sampled)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            self._step(sampled)
        return graph


@dataclass
class _Emitted:
    """A step's tokens, on their way to the host."""

    tokens: Tensor
    event: torch.cuda.Event | None

    def ready(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens


def _collect(emitted: _Emitted, jobs: dict[int, _Job]) -> Iterator[Finished]:
    """Hand a step's tokens to their requests; -1 is of a row that was idle."""
    for row, token in enumerate(emitted.ready()):
        if token >= 0 and row in jobs:
            ended = jobs[row].take(token)
            if ended is not None:
                del jobs[row]
                yield ended


def _tell(asked: list[Request], start: int, end: int, longest: int) -> None:
    """Those who listen hear how many of their tokens are among these columns; padding is on the left."""
    for request in asked:
        begin = longest - len(request.prompt)
        if request.on_read is not None and end > begin:
            request.on_read(end - max(start, begin))


def _padded(prompts: list[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with padding on the left, and which of them are real."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
    sizes = torch.tensor([len(prompt) for prompt in prompts], device=device)
    real = torch.arange(longest, device=device) >= longest - sizes[:, None]
    return ids, real.to(torch.int64)
