"""Pipelined prefill: a long prompt alone, with several chunks in flight, each a layer behind the one before it.

A layer may take a chunk as soon as it is done with the last one, whatever the layers above are doing. So chunks go
through the whole model on a few streams, the lanes, and every layer's slots pass from stream to stream. A round of
chunks is one CUDA graph, in which a lane starts its next chunk without waiting for the others; a prompt is a few
rounds. Without a GPU the same rounds run one chunk after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from .. import kernels
from ..core.attention import Attention
from ..core.heads import LayerSlots, parts_of, read_groups
from ..core.recurrence import Chunks
from ..core.slots import Slots
from ..core.workspace import Workspace
from ..hf.cache import BoundedCache, BoundedLayer
from ..rnn import RNN
from .compiled import compile_forward
from .projections import FusedProjections

CHUNK = 256  # tokens: the weights are read once for each chunk
LANES = 12  # chunks in flight: more would leave the matmuls too few SMs
LAPS = 4  # chunks that a lane takes in the longest round: at both ends of a round lanes stand idle


class OpenWorkspace(Workspace):
    """A workspace that stays open from chunk to chunk, in memory of its own, so that nothing is copied in between."""

    def __init__(self, slots: Slots, chunk: int, dtype: torch.dtype) -> None:
        assert slots.limit is not None
        self.slots, self.used = slots, slots.limit

        def widen(rows: Tensor, value: int = 0) -> Tensor:
            return rows.new_full((*rows.shape[:2], slots.limit + chunk, *rows.shape[3:]), value)  # type: ignore[operator]

        shape, device = (*slots.keys.shape[:2], slots.limit + chunk), slots.keys.device
        self.keys, self.values = (torch.zeros(*shape, size, dtype=dtype, device=device) for size in slots.sizes)
        self.codes = [widen(rows) for rows in slots.codes]
        self.positions = widen(slots.positions, -1)
        self.scores, self.gains = (None if rows is None else widen(rows) for rows in (slots.scores, slots.gains))
        self.memory = None if slots.memory is None else widen(slots.memory)

    def open(self) -> None:
        """Begin again from the slots, which are full."""
        self.used = self.slots.filled
        for name in ("positions", "scores", "gains", "memory"):
            ours, theirs = getattr(self, name), getattr(self.slots, name)
            if ours is not None:
                ours[:, :, : self.used] = theirs[:, :, : self.used]
        self.fill()
        self.pack()


class LaneLayer(BoundedLayer):
    """A layer whose slots pass from one chunk to the next, on whatever stream that is."""

    def __init__(self, like: BoundedLayer, chunk: int, dtype: torch.dtype) -> None:
        super().__init__(like.policy, "recurrent", chunk)
        assert like.slots is not None
        self.shared: LayerSlots = like.slots.fork()  # not `slots`: checks on that would wait for the device
        self.groups = read_groups(self.shared, self.policy)
        slots = [group.join(parts_of(self.shared)) for group in self.groups]
        self.spaces = [OpenWorkspace(one, chunk, dtype) for one in slots]
        self.offsets = torch.arange(chunk, device=self.shared.seen.device)
        self.done: torch.cuda.Event | None = None
        self.is_initialized = True

    def attend(self, query: Tensor, attention: Attention, real: Tensor | None) -> Tensor:
        key, value = self.take_pending()
        stream = torch.cuda.current_stream() if query.is_cuda else None
        if stream is not None and self.done is not None:
            stream.wait_event(self.done)
        output = self._read(query, key, value, attention)
        if stream is not None:
            self.done = stream.record_event()
        return output

    def _read(self, query: Tensor, key: Tensor, value: Tensor, attention: Attention) -> Tensor:
        """One chunk of the recurrence in the open workspaces."""
        size = query.shape[2]
        output = value.new_empty(len(query), size, query.shape[1], value.shape[3]).transpose(1, 2)
        steps = self.spaces[0].slots.seen[:, None] + self.offsets
        for space, group in zip(self.spaces, self.groups, strict=True):
            tokens = (group.take(query), *space.slots.expand(group.take(key), group.take(value)))
            mixed, own = group.take(output), group.attention(attention)
            chunks = Chunks(space, tokens, steps, group.policy, own, mixed)
            chunks.evict(chunks.attend(slice(0, size)))
            if group.index is not None:
                group.put(output, mixed)
            space.slots.seen += size
            space.slots.fed += size
        return output

    def load(self, slots: LayerSlots) -> None:
        """Begin again from slots that were filled elsewhere, in the same memory."""
        for space, group in zip(self.spaces, self.groups, strict=True):
            theirs = group.join(parts_of(slots))
            for name, ours in space.slots.tensors().items():
                ours.copy_(theirs.tensors()[name])
            space.slots.fed, space.slots.packed_at = theirs.fed, theirs.packed_at
            space.open()

    def result(self) -> LayerSlots:
        """A copy of what the slots are now."""
        for space, group in zip(self.spaces, self.groups, strict=True):
            space.close()
            group.split(space.slots, parts_of(self.shared))
        return self.shared.fork()

    def get_seq_length(self) -> int:
        return 0  # positions are given with the tokens


class PipelinedPrefill:
    """Reads one prompt at a time. Made once; rounds of each size are captured at first use."""

    def __init__(
        self,
        rnn: RNN,
        *,
        chunk: int = CHUNK,
        lanes: int = LANES,
        laps: int = LAPS,
        compile: bool = False,
        fused_projections: bool | None = None,
    ) -> None:
        """`compile` and `fused_projections` (None: on a GPU) are those of `EngineOptions`."""
        for name, value in (("chunk", chunk), ("lanes", lanes), ("laps", laps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        capacities = [policy.capacity for policy in rnn.plan.parts]
        if None in capacities:
            raise ValueError(f"{rnn.plan} keeps every token; only bounded states are read in a pipeline")
        self.rnn, self.chunk, self.lanes, self.laps = rnn, chunk, lanes, laps
        self.before = max(2, *(c for c in capacities if c is not None))  # from here on all shapes stay the same
        self._call = compile_forward(self._forward) if compile else self._forward
        self.cache: BoundedCache | None = None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by chunks, with the logits they leave
        device = rnn.device
        self.tokens = torch.zeros(1, laps * lanes * chunk, dtype=torch.int64, device=device)
        self.start = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.fused = device.type == "cuda" if fused_projections is None else fused_projections
        self._weights = FusedProjections(rnn.model) if self.fused else nullcontext()

    @cached_property
    def streams(self) -> list[torch.cuda.Stream]:
        """The lanes on a GPU. Taken when first needed: PyTorch has 32 streams for everybody."""
        lanes = self.lanes if self.rnn.device.type == "cuda" else 0
        return [torch.cuda.Stream(self.rnn.device) for _ in range(lanes)]  # type: ignore[no-untyped-call]

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """Not PyTorch's default for captures: destroying a graph frees the workspace of its capture stream."""
        return torch.cuda.Stream(self.rnn.device)  # type: ignore[no-untyped-call]

    def fits(self, length: int) -> bool:
        """Whether a prompt is long enough to fill every lane once."""
        return length >= self.before + self.lanes * self.chunk

    @torch.no_grad()
    def read(self, ids: Tensor, on_read: Callable[[int], None] | None = None) -> tuple[Tensor, BoundedCache]:
        """ids [1, T] -> logits [1, vocabulary] after the last token, and the state; `on_read` gets token counts.

        A prompt that does not fit is read, too, in fewer chunks.
        """
        report = on_read or (lambda _: None)
        logits, state = self.rnn.step(ids[:, : self.before], self.rnn.start())
        at = min(self.before, ids.shape[1])
        report(at)
        if size := self._round_size(ids.shape[1] - at):
            self._load(state.cache)
            while size:
                tokens = ids[:, at : at + size * self.chunk]
                logits, at = self._round(size, tokens, at), at + tokens.shape[1]
                report(tokens.shape[1])
                size = self._round_size(ids.shape[1] - at)
            self._store(state.cache)
        if at < ids.shape[1]:
            logits, state = self.rnn.step(ids[:, at:], state)
            report(ids.shape[1] - at)
        return logits, state.cache

    def _round_size(self, left: int) -> int:
        """Chunks of the next round: few sizes, so that few graphs are captured."""
        chunks = left // self.chunk
        if chunks <= self.lanes:
            return chunks
        return self.lanes * min(self.laps, 1 << (chunks // self.lanes).bit_length() - 1)

    def _load(self, cache: BoundedCache) -> None:
        if self.cache is None:
            layers = [LaneLayer(layer, self.chunk, self.rnn.model.dtype) for layer in cache.bounded]
            self.cache = BoundedCache.with_layers(cache, layers)
        for ours, theirs in zip(self._layers, cache.bounded, strict=True):
            assert theirs.slots is not None
            ours.load(theirs.slots)

    def _store(self, cache: BoundedCache) -> None:
        for ours, theirs in zip(self._layers, cache.bounded, strict=True):
            theirs.slots = ours.result()

    @property
    def _layers(self) -> list[LaneLayer]:
        assert self.cache is not None
        return [layer for layer in self.cache.layers if isinstance(layer, LaneLayer)]

    def _round(self, size: int, tokens: Tensor, at: int) -> Tensor:
        """So many chunks, from position `at` on: the logits after them."""
        self.tokens[:, : tokens.shape[1]] = tokens
        self.start.fill_(at)
        if not self.streams:
            return self._chunks(size)
        if size not in self.graphs:
            self._capture(size)
        else:
            for space in (space for layer in self._layers for space in layer.spaces):
                space.slots.fed += tokens.shape[1]
        graph, logits = self.graphs[size]
        graph.replay()
        return logits.clone()

    def _capture(self, size: int) -> None:
        """A graph of a round. Before the first, all is run once and undone, so that every kernel is compiled."""
        if not self.graphs:
            before = [(layer, layer.result()) for layer in self._layers]
            self._chunks(min(size, self.lanes), one_by_one=True)
            for layer, slots in before:
                layer.load(slots)
        torch.cuda.synchronize()
        self._clear_events()  # a graph may not wait for what is outside of it
        graph, others = torch.cuda.CUDAGraph(), [graph for graph, _ in self.graphs.values()]
        pool = others[0].pool() if others else None  # one is done before the next begins
        with torch.cuda.graph(graph, pool=pool, stream=self._capture_stream):
            logits = self._chunks(size)
        self._clear_events()
        self.graphs[size] = graph, logits

    def _clear_events(self) -> None:
        for layer in self._layers:
            layer.done = None

    def _chunks(self, size: int, one_by_one: bool = False) -> Tensor:
        """Each chunk through all layers on a lane. What one needs of another passes through the layers.

        `one_by_one`: none begins before the last is done, for the only read that is not a graph.
        """
        lanes, main = self.streams[:size], [torch.cuda.current_stream()] if self.streams else []
        for stream in lanes:
            stream.wait_stream(main[0])
        with self._scans(min(size, self.lanes)), self._weights:
            for index in range(size):
                part = slice(index * self.chunk, (index + 1) * self.chunk)
                with _on(lanes[index % len(lanes)] if lanes else None):
                    offsets = torch.arange(part.start, part.stop, device=self.rnn.device)
                    logits = self._call(self.tokens[:, part], self.start + offsets)
                if one_by_one:
                    torch.cuda.synchronize()
        for stream in lanes:
            main[0].wait_stream(stream)
        return logits

    def _scans(self, count: int) -> AbstractContextManager[object]:
        return kernels.concurrent_scans(count) if self.streams else nullcontext()

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.rnn.model(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
