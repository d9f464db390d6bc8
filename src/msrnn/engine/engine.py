"""Batch generation with static buffers: one step for all rows, as one CUDA graph where there is a GPU.

Prompts are read by the recurrence in chunks, some at a time, and their slots go into rows of the batch. Every step
writes one token to each row, sampling included. A row that ends goes to the next request without a new capture. The
device itself finds out which rows have ended, so the host stays one step behind and nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import kernels
from ..hf.cache import BoundedCache
from ..plan import PolicyLike
from ..rnn import PIECE, RNN
from .compiled import compile_forward
from .pipeline import CHUNK as PIPELINE_CHUNK
from .pipeline import PipelinedPrefill
from .projections import FusedProjections
from .request import MOST_STOPS, Finished, Request
from .rows import Emitted, Job, Rows, collect, sampling_settings
from .sampling import pick
from .static_cache import FullAttention, StaticCache

MOST_TOGETHER = 32  # prompts that are read at once
FEW = 2  # so many long prompts are faster one by one in the pipeline than together
LONG = 49152  # tokens from which on it pays to capture the pipeline's graphs for one prompt


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs; None is the default for the device. Results depend on these by rounding only.

    `chunk`: tokens of a prompt whose evictions are one scan. `piece`: tokens per forward while reading. `cuda_graphs`:
    a step is one graph (None: on a GPU). `compile`: torch.compile fuses what lies between the matmuls.
    `full_attention`: the backend of layers that keep everything, see `FullLayer`. `pipelined_prefill`: a long prompt
    that comes alone has several chunks in flight (None: with graphs, from 49,152 tokens on). `fused_projections`: QKV
    and gate/up as one matmul each (None: with graphs).
    """

    chunk: int | None = None
    piece: int = PIECE
    cuda_graphs: bool | None = None
    compile: bool = False
    full_attention: FullAttention | None = None
    pipelined_prefill: bool | None = None
    fused_projections: bool | None = None


class Engine:
    """A model, a policy and a batch of static rows. `length`: room per row where a layer keeps everything.

    >>> engine = msrnn.Engine(model, "tova:512", batch=48)
    >>> engine.generate(prompts, max_new_tokens=200)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: PolicyLike,
        *,
        batch: int = 8,
        length: int | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        options = options or EngineOptions()
        self.model, self.batch = model, batch
        trained = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        on_gpu = model.get_input_embeddings().weight.is_cuda
        self.rnn = RNN(model, policy, length=length, chunk=options.chunk, piece=options.piece)
        unbounded = any(policy.capacity is None for policy in self.rnn.plan.parts)
        self.length = (length or trained) if unbounded else None
        rules = [policy.rule for policy in self.rnn.plan.parts if policy.rule is not None]
        self.graphs = (on_gpu and not rules) if options.cuda_graphs is None else options.cuda_graphs
        if self.graphs and rules:
            raise ValueError(f"{rules[0]} has no kernel yet, so it cannot go into a CUDA graph; leave cuda_graphs out")
        if self.graphs and not on_gpu:
            raise ValueError(f"CUDA graphs need a GPU, and the model is on {self.rnn.device}; leave cuda_graphs out")
        self.fused = self.graphs if options.fused_projections is None else options.fused_projections
        self._weights = FusedProjections(model) if self.fused else nullcontext()
        self._call = compile_forward(self._forward) if options.compile else self._forward
        self._captured: dict[bool, torch.cuda.CUDAGraph] = {}
        self._capture_stream: torch.cuda.Stream | None = None
        _, state = self.rnn.step(torch.zeros(1, 1, dtype=torch.int64), self.rnn.start())
        self.cache = StaticCache(state.cache, batch, self.length, options.full_attention)
        self.rows, self._decisions = Rows(batch, self.rnn.device), kernels.decision_stream(self.rnn.device)
        self.pipeline = None if unbounded else self._pipeline(options)
        self._long = LONG if options.pipelined_prefill is None else 0

    def _pipeline(self, options: EngineOptions) -> PipelinedPrefill | None:
        wanted = self.graphs if options.pipelined_prefill is None else options.pipelined_prefill
        if not wanted:
            return None
        chunk = PIPELINE_CHUNK if options.chunk is None else options.chunk
        return PipelinedPrefill(self.rnn, chunk=chunk, compile=options.compile, fused_projections=self.fused)

    def generate(self, prompts: Iterable[Sequence[int]], **settings: Any) -> list[list[int]]:
        """The new tokens of every prompt, in order; `settings` are those of a Request. All are checked first."""
        waiting = [self._job(i, Request(prompt, **settings)) for i, prompt in enumerate(prompts)]
        done = sorted(self._run(iter(waiting)), key=lambda each: each.index)
        return [each.tokens for each in done]

    def run(self, requests: Iterable[Request]) -> Iterator[Finished]:
        """Requests as they end, taken in and checked as rows become free."""
        return self._run(self._job(i, request) for i, request in enumerate(requests))

    @torch.no_grad()
    def _run(self, waiting: Iterator[Job]) -> Iterator[Finished]:
        jobs: dict[int, Job] = {}
        self.cache.seen.fill_(-1)
        behind: list[Emitted] = []
        while True:
            yield from self._admit(waiting, jobs)
            if not jobs:
                return
            sampled = any(job.request.temperature > 0 for job in jobs.values())
            behind.append(self._launch(sampled))
            if len(behind) > self.graphs:  # the host stays a step behind a GPU
                yield from collect(behind.pop(0), jobs)

    def _job(self, index: int, request: Request) -> Job:
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
        if len(listed) > MOST_STOPS:
            raise ValueError(
                f"the model's generation config has {len(listed)} end tokens; the engine takes {MOST_STOPS} at most: "
                "give each Request its own stops="
            )
        return Job(index, request, listed)

    def _admit(self, waiting: Iterator[Job], jobs: dict[int, Job]) -> Iterator[Finished]:
        """Read prompts into rows until none is vacant or nobody waits."""
        while vacant := [row for row in range(self.batch) if row not in jobs][:MOST_TOGETHER]:
            new = list(islice(waiting, len(vacant)))
            if not new:
                return
            for group in self._groups(new):
                yield from self._begin(group, vacant, jobs)

    def _groups(self, new: list[Job]) -> list[list[Job]]:
        """Which prompts are read together: all, but of a few those that the pipeline reads alone."""
        alone = [job for job in new if len(new) <= FEW and self._in_pipeline(len(job.request.prompt))]
        others = [job for job in new if job not in alone]
        return [*([job] for job in alone), *([others] if others else [])]

    def _in_pipeline(self, length: int) -> bool:
        if self.pipeline is None or not self.pipeline.fits(length):
            return False
        return bool(self.pipeline.graphs) or length >= self._long

    def _begin(self, new: list[Job], vacant: list[int], jobs: dict[int, Job]) -> Iterator[Finished]:
        """Prompts go through the model into vacant rows; some requests end with their first token."""
        tokens, cache = self._prefill(new)
        ended = [job.take(token) for job, token in zip(new, tokens, strict=True)]
        yield from (end for end in ended if end is not None)
        going = [i for i, end in enumerate(ended) if end is None]
        if going:
            rows = [vacant.pop(0) for _ in going]
            self._seat(rows, [new[i] for i in going], cache, going)
            jobs.update(zip(rows, (new[i] for i in going), strict=True))

    def _seat(self, rows: list[int], jobs: list[Job], cache: BoundedCache, going: list[int]) -> None:
        """Row `going[i]` of what was read goes on in row `rows[i]` of the batch."""
        device = self.rnn.device
        if len(going) < len(next(cache.bounded).slots.seen):  # type: ignore[union-attr]
            cache.batch_select_indices(torch.tensor(going, device=device))
        where = torch.tensor(rows, device=device)
        self.cache.load(where, cache)
        self.rows.put(where, jobs)

    def _prefill(self, jobs: list[Job]) -> tuple[list[int], BoundedCache]:
        """The first token of each, and the states after the prompts."""
        requests = [job.request for job in jobs]
        ids, real = _padded([request.prompt for request in requests], self.rnn.device)
        if self.pipeline is not None and len(jobs) == 1 and self._in_pipeline(ids.shape[1]):
            logits, cache = self.pipeline.read(ids, requests[0].on_read)
        else:
            logits, cache = self._read(ids, real, requests)
        how = {name: torch.tensor(value, device=logits.device) for name, value in sampling_settings(requests).items()}
        return pick(logits, **how, count=torch.zeros_like(how["seed"])).tolist(), cache

    def _read(self, ids: Tensor, real: Tensor, requests: list[Request]) -> tuple[Tensor, BoundedCache]:
        """Prompts of any lengths together, piece by piece."""
        state, ragged, end = self.rnn.start(), not bool(real.all()), 0
        pieces = (torch.split(tensor, self.rnn.piece, 1) for tensor in (ids, real))
        for tokens, mask in zip(*pieces, strict=True):
            logits, state = self.rnn.step(tokens, state, mask if ragged else None)
            start, end = end, end + tokens.shape[1]
            _report(requests, start, end, ids.shape[1])
        return logits, state.cache

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, vocabulary]: the logits after one token of every row."""
        logits: Tensor = self.model(
            input_ids=tokens[:, None], position_ids=positions[:, None], past_key_values=self.cache, use_cache=True
        ).logits
        return logits[:, -1]

    @torch.no_grad()
    def step(self, sampled: bool = False) -> None:
        """One token for every row that has not ended; of the others nothing changes."""
        rows, seen = self.rows, self.cache.seen
        active = seen >= 0
        self.cache.begin()
        with self._decisions, self._weights:
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

    def _launch(self, sampled: bool) -> Emitted:
        if not self.graphs:
            self.step(sampled)
            return Emitted(self.rows.emitted.clone(), None)
        self.capture(sampled).replay()
        emitted = torch.empty(self.batch, dtype=torch.int64, pin_memory=True)
        emitted.copy_(self.rows.emitted, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Emitted(emitted, event)

    @torch.no_grad()
    def capture(self, sampled: bool = False) -> torch.cuda.CUDAGraph:
        """The graph of a step, captured at first use with all rows idle, so that nothing of them changes."""
        if sampled not in self._captured:
            with self.cache.idle():
                self._captured[sampled] = self._capture(sampled)
        return self._captured[sampled]

    def _capture(self, sampled: bool) -> torch.cuda.CUDAGraph:
        """On a stream of this engine: destroying a graph frees the matmul workspace of its capture stream."""
        stream = self._capture_stream = self._capture_stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are compiled and workspaces made before the capture
                self.step(sampled)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.step(sampled)
        return graph


def _report(requests: list[Request], start: int, end: int, longest: int) -> None:
    """Call `on_read` with how many of a request's tokens are among these columns; padding is on the left."""
    for request in requests:
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
