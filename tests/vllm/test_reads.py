"""Prompts of many requests read together, in blocks as vLLM gives them: each equals its text read alone."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from msrnn.core import head_groups
from msrnn.core.attention import Attention
from msrnn.core.heads import empty_slots, parts_of, read, read_groups
from msrnn.plan import parse_layer_policy
from msrnn.vllm import batch as batches
from msrnn.vllm import read_graphs, reads, warmup
from msrnn.vllm.batch import Batch, attend, attend_piece, batch_of
from msrnn.vllm.block import Layout
from msrnn.vllm.lanes import Turns
from msrnn.vllm.reads import Row, Sizes, plan
from msrnn.vllm.warmup import warm_up

HEADS, KV_HEADS, SIZE = 6, 3, 8
LENGTH, BLOCKS = 300, 20
POLICIES = (
    *("tova:48", "tova-head:48", "tova-query-head:48", "h2o:48", "h2o-layer:48", "window+4:48", "fade:48"),
    *("tova+2:48,last=8,momentum=0.5", "tova:48,gain=value_norm", "h2o:48,gain=value_norm", "tova:150", "h2o:150"),
    *("tova:48,kv=int8", "h2o:48,kv=k8v4", "tova:150,kv=k8v4"),
    *("blend:48", "blend-layer+1:48,kv=k8v4", "tova:150,residual=0.9", "blend:30|fade:48|tova-head:70,residual=0.9"),
    *("fade:30|fade:48|fade:70", "tova-head:150|tova-head:20|tova-head:48", "h2o:48,kv=k8v4|h2o:48|window+4:48"),
)
IN_16_BITS = (
    *("tova:48", "tova:48,kv=int8", "h2o:48,kv=k8v4", "tova:150,kv=k8v4", "blend:48", "blend-layer+1:48,kv=k8v4"),
    "h2o:48,kv=k8v4|h2o:48|window+4:48",
)
CASES = [
    *((text, torch.float32) for text in POLICIES),
    *((text, dtype) for text in IN_16_BITS for dtype in (torch.bfloat16, torch.float16)),
]
# Relative and absolute: in 16 bits of outputs, and of the weights of tokens that fit, which PyTorch attends to.
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2**-7, 2**-6), torch.float16: (2**-10, 2**-9)}


class Requests:
    """Requests in blocks whose memory holds NaN, fed batch by batch with pieces of random length."""

    def __init__(
        self, text: str, attention: Attention, seed: int, count: int = 6, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.policy, self.attention = parse_layer_policy(text), attention
        layout = Layout(self.policy, HEADS, KV_HEADS, SIZE, SIZE, dtype)
        self.raw = torch.full((BLOCKS, 1, 1, layout.nbytes), 0xFF, dtype=torch.uint8)
        self.blocks = layout.carve(self.raw.view(dtype))
        sizes = (HEADS, KV_HEADS, KV_HEADS)
        self.texts = [[torch.randn(LENGTH, n, SIZE).to(dtype) for n in sizes] for _ in range(count)]
        self.homes = self.random.sample(range(1, BLOCKS), count)
        self.seen, self.outputs = [0] * count, [[] for _ in range(count)]

    def run(self, sizes: list[int]) -> None:
        """One batch: so many new tokens of each request, single ones first, as vLLM orders them."""
        sizes = [min(size, LENGTH - seen) for size, seen in zip(sizes, self.seen, strict=True)]
        order = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: sizes[i] > 1)
        starts = [0]
        for i in order:
            starts.append(starts[-1] + sizes[i])
        seen = [self.seen[i] for i in order]
        batch = batch_of(torch.tensor([self.homes[i] for i in order]), torch.tensor(seen), starts, seen)
        parts = [[self.texts[i][n][self.seen[i] : self.seen[i] + sizes[i]] for i in order] for n in range(3)]
        new = [torch.cat(part) for part in parts]
        output = torch.empty_like(new[0])
        self.attend(batch, new, output)
        for i, start in zip(order, starts, strict=False):
            self.outputs[i].append(output[start : start + sizes[i]])
            self.seen[i] += sizes[i]

    def attend(self, batch: Batch, new: list[torch.Tensor], output: torch.Tensor) -> None:
        attend(self.blocks, batch, *new, self.policy, self.attention, output)

    def mixed(self, turns: int) -> None:
        for _ in range(turns):
            self.run([self.random.choice([0, 1, 1, 2, 5, 17, 60, 130, 200]) for _ in self.homes])

    def check(self) -> None:
        for home, seen, outputs, text in zip(self.homes, self.seen, self.outputs, self.texts, strict=True):
            if not seen:
                continue
            query, key, value = (tensor[:seen].transpose(0, 1)[None] for tensor in text)
            alone = empty_slots(self.policy, key, value, HEADS)
            expected = read(alone, query, key, value, self.policy, self.attention)[0].transpose(0, 1)
            relative, absolute = TOLERANCE[query.dtype]
            torch.testing.assert_close(torch.cat(outputs), expected, rtol=relative, atol=absolute)
            for ours, theirs in zip(parts_of(self.blocks), parts_of(alone), strict=True):
                held = ours.positions[home].sort(-1).values
                assert torch.equal(held, theirs.positions[0].sort(-1).values), "the same tokens are held"


@pytest.fixture(params=["cpu", "as on a GPU"])
def planned(request, monkeypatch):
    """Plans as for a GPU pad rows to compiled lengths and take all slots as used; the results are the same."""
    monkeypatch.setattr(read_graphs, "_graphs", {})
    if request.param != "cpu":
        sizes_of = batches.sizes_of
        monkeypatch.setattr(batches, "sizes_of", lambda *arguments: sizes_of(*arguments)._replace(gpu=True))


@pytest.mark.parametrize("text, dtype", CASES, ids=str)
def test_requests_read_together_equal_each_alone(text, dtype, planned):
    """Some fit into their slots, some evict, some begin, some only step; nobody else's block changes."""
    for seed in range(2):
        requests = Requests(text, Attention(SIZE**-0.5), seed, dtype=dtype)
        before = requests.raw.clone()
        requests.mixed(8)
        requests.check()
        others = [block for block in range(BLOCKS) if block not in requests.homes]
        assert torch.equal(requests.raw[others], before[others])


@pytest.mark.parametrize(
    "text",
    ["fade:30|fade:48|fade:70", "tova-head:150|tova-head:20|tova-head:48", "h2o:48,kv=k8v4|h2o:48|h2o:90,kv=k8v4"],
)
def test_kv_heads_read_together_equal_each_text_alone(text, planned, monkeypatch):
    """As on a GPU: heads of similar size are gathered from their blocks and read side by side."""
    requests = Requests(text, Attention(SIZE**-0.5), 0)
    with monkeypatch.context() as patch:
        patch.setattr(head_groups, "_together", lambda _: True)
        before = requests.raw.clone()
        requests.mixed(10)
        assert any(group.index is not None for group in read_groups(requests.blocks, requests.policy))
    requests.check()
    others = [block for block in range(BLOCKS) if block not in requests.homes]
    assert torch.equal(requests.raw[others], before[others])


@pytest.fixture
def runs(monkeypatch) -> list[bool]:
    """Plans as for a GPU, with small graphs: what every run of one returned, none of them captured yet."""
    results: list[bool] = []
    monkeypatch.setattr(read_graphs, "_graphs", {})
    monkeypatch.setattr(reads, "TAILS", (8, 32))
    monkeypatch.setattr(reads, "GRAPHS", (32, 64, 128))
    sizes_of = batches.sizes_of
    monkeypatch.setattr(batches, "sizes_of", lambda *arguments: sizes_of(*arguments)._replace(gpu=True))
    monkeypatch.setattr(read_graphs.BlockReads, "run", counted(read_graphs.BlockReads.run, results))
    return results


@pytest.mark.parametrize("text", POLICIES)
def test_reads_at_fixed_addresses_equal_each_text_alone(text, runs):
    """What a CUDA graph does, without the graph: single rows are cut into captured widths, copied there and back."""
    requests = Requests(text, Attention(SIZE**-0.5), 0)
    layout = Layout(requests.policy, HEADS, KV_HEADS, SIZE, SIZE, torch.float32)
    for part in layout.parts:
        blocks = part.carve(torch.zeros(1, part.nbytes, dtype=torch.uint8))
        new = tuple(torch.empty(1, n, SIZE) for n in (part.heads, part.kv_heads, part.kv_heads))
        read_graphs.capture(blocks, new, part.policy, requests.attention, reads.graph_shapes(512), 32)
    for number in range(6):  # alone, then together, all of the same length, and of any
        requests.run([100 - 15 * number if i == number else 0 for i in range(6)])
    requests.run([70] * 6)
    requests.mixed(4)
    requests.check()
    assert len(runs) > 5, "parts were read this way"
    assert all(runs), "and a graph was large enough"


class InPieces(Requests):
    """A long prompt goes through the layer in pieces of 32 tokens, on three lanes; they end at `stops`, too."""

    def __init__(self, *arguments, stops=None) -> None:
        super().__init__(*arguments)
        self.stops = stops or {}

    def attend(self, batch: Batch, new: list[torch.Tensor], output: torch.Tensor) -> None:
        assert batch.token_count == len(output)
        if len(batch.rows) != 1 or (batch.rows[0].size <= 32 and not self.stops):
            super().attend(batch, new, output)
            return
        for tokens, piece in batch.pieces(32, Turns(gpu=False), 3, self.stops):
            some = [tensor[tokens] for tensor in new]
            attend_piece("layer", lambda: self.blocks, piece, *some, self.policy, self.attention, output[tokens])


@pytest.mark.parametrize("text", ["tova:150,residual=0.9", "blend:48", "tova:48"])
def test_preempted_requests_start_over_in_other_blocks(text, planned):
    """In blocks that others have used: all are emptied, also of requests whose prompt fits or is a single token."""
    requests = Requests(text, Attention(SIZE**-0.5), 1)
    requests.mixed(6)
    requests.homes = requests.homes[1:] + requests.homes[:1]
    requests.seen, requests.outputs = [0] * len(requests.homes), [[] for _ in requests.homes]
    requests.run([1, 1, 20, 20, 200, 200])
    requests.mixed(6)
    requests.check()


@pytest.mark.parametrize("text, most", [("tova:9", 16384), ("tova:9,residual=1", 7936), ("key_difference:9", 0)])
def test_states_that_a_graph_may_read(text, most):
    policy = parse_layer_policy(text)
    for slots in (most, most + 1):
        layout = Layout(replace(policy, capacity=max(1, slots - 1)), 1, 1, 1, 1, torch.float32)
        (part,) = layout.parts
        blocks = part.carve(torch.zeros(1, part.nbytes, dtype=torch.uint8, device="meta"))
        assert read_graphs.can_be_captured(blocks, part.policy, Attention(1.0)) == (slots == most > 0)


def test_a_scan_with_a_residual_takes_a_chunk_of_such_states():
    """All but the empty slot, the chunk, and the residual: plain PyTorch is no part of a graph."""
    kernel = pytest.importorskip("msrnn.kernels.triton.scan_residual")
    assert read_graphs._MOST_BLENDED - 1 + reads.TAILS[-1] + 1 == kernel._MOST_COLUMNS


@pytest.mark.parametrize("text", [text for text in POLICIES if "|" not in text])
def test_a_prompt_in_pieces_equals_the_whole(text, runs, monkeypatch):
    """Every lane has graphs of its own, whose only row is copied as one block."""
    pairs = []
    monkeypatch.setattr(read_graphs.BlockReads, "pairs", counted(read_graphs.BlockReads.pairs, pairs))
    requests = InPieces(text, Attention(SIZE**-0.5), 0)
    (part,) = Layout(requests.policy, HEADS, KV_HEADS, SIZE, SIZE, torch.float32).parts
    new = tuple(torch.empty(1, n, SIZE) for n in (part.heads, part.kv_heads, part.kv_heads))
    for lane in range(3):
        blocks = part.carve(torch.zeros(1, part.nbytes, dtype=torch.uint8))
        read_graphs.capture(blocks, new, part.policy, requests.attention, [(1, 8), (1, 32)], 32, lane)
    before = requests.raw.clone()
    requests.run([200, 0, 0, 0, 0, 0])
    requests.run([1, 150, 0, 0, 0, 0])
    requests.run([70, 1, 0, 0, 0, 0])
    requests.check()
    assert len(runs) > 3, "pieces were read this way"
    assert all(runs), "and a graph was large enough"
    assert all(len(pair) == 1 for pair in pairs), "a block was copied in one go"
    others = [block for block in range(BLOCKS) if block not in requests.homes[:2]]
    assert torch.equal(requests.raw[others], before[others])


@pytest.mark.parametrize("text", ["tova:48", "tova:150", "blend:48", "h2o:48,kv=k8v4"])
@pytest.mark.parametrize("sizes", [[120], [1, 119], [13, 107]])
def test_a_state_kept_between_pieces_goes_on_in_another_block(text, sizes, planned):
    """As for the pool of states: after 40 tokens, where another request has a step in the same piece, and after 96."""

    def keep(stop: int):
        return lambda layer: kept.update({stop: requests.raw[requests.homes[0]].clone()})

    kept = {}
    requests = InPieces(text, Attention(SIZE**-0.5), 0, stops={stop: keep(stop) for stop in (40, 96)})
    for size in sizes:
        requests.run([size, 0, 0, 1, 0, 0])
    assert list(kept) == [40, 96]
    requests.stops = {}
    whole = torch.cat(requests.outputs[0])
    for number, (stop, block) in enumerate(kept.items(), 1):
        requests.raw[requests.homes[number]] = block
        requests.texts[number], requests.seen[number] = requests.texts[0], stop
        requests.outputs[number] = [whole[:stop]]
    requests.run([60, 100, 70, 1, 0, 0])
    requests.check()


def test_where_pieces_end():
    def ends(size: int, seen: int, stops: tuple[int, ...]) -> list[tuple[int, bool]]:
        """Of a prompt behind two steps: the last token of every piece, and whether it is kept."""
        batch = batch_of(torch.zeros(3), torch.zeros(3), [0, 1, 2, 2 + size], [5, 5, seen])
        pieces = batch.pieces(100, Turns(gpu=False), 3, dict.fromkeys(stops, print))
        assert pieces[0][0].start == 0
        assert all(one[0].stop == two[0].start for one, two in pairwise(pieces))
        assert [piece.steps for _, piece in pieces] == [2] + [0] * (len(pieces) - 1)
        assert sum(piece.rows[0].size for _, piece in pieces) == size
        return [(tokens.stop - 2 + seen, piece.keep is print) for tokens, piece in pieces]

    assert ends(250, 0, ()) == [(100, False), (200, False), (250, False)]
    assert ends(250, 0, (64, 128)) == [(64, True), (128, True), (228, False), (250, False)]
    assert ends(250, 30, (64, 264)) == [(64, True), (164, False), (264, True), (280, False)]
    assert ends(250, 30, (20, 30, 280)) == [(130, False), (230, False), (280, True)], "others are no part of it"


def counted(method, calls: list):
    def call(*arguments):
        calls.append(method(*arguments))
        return calls[-1]

    return call


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ([100], [256]),
        ([256], [256]),
        ([300], [256, 512]),
        ([3584], [2048, 3072, 3584]),
        ([20000], [8192, 16384, 18432, 19456, 19968, 20224]),
        ([512, 512], [512]),
        ([700, 300], [256, 512, 768]),
    ],
)
def test_rows_are_cut_into_captured_widths(sizes, expected):
    assert reads._ends([Row(number, 0, size, 0) for number, size in enumerate(sizes)], 256, gpu=True) == expected


@pytest.mark.parametrize(
    "attention",
    [Attention(SIZE**-0.5, softcap=20.0), Attention(SIZE**-0.5, sinks=torch.linspace(-1, 1, HEADS))],
    ids=["soft cap", "sinks"],
)
@pytest.mark.parametrize("text", ["tova:48", "tova:150", "h2o:48", "h2o:30|h2o:70|h2o:48"])
def test_attention_that_is_not_plain(text, attention, planned):
    requests = Requests(text, attention, 3)
    requests.mixed(8)
    requests.check()


def test_few_rows_at_once(monkeypatch):
    """Where memory is short, rows are read in several groups."""
    monkeypatch.setattr(reads, "_BYTES", 1)
    requests = Requests("h2o:48", Attention(SIZE**-0.5), 0)
    requests.mixed(8)
    requests.check()


@pytest.mark.parametrize("text", ["tova:150", "tova:150,kv=k8v4"])
def test_earlier_keys_are_gathered_a_few_rows_at_a_time(text, planned, monkeypatch):
    """Requests of any length that go on, all of which fit: what one call gathers and pads stays within the limit."""
    monkeypatch.setattr(reads, "_HELD_BYTES", limit := 2 * 200 * KV_HEADS * 2 * SIZE * 4)
    sizes, held = [], batches._held

    def measured(*arguments):
        sizes.append(sum(tensor.nbytes for tensor in held(*arguments)))
        return held(*arguments)

    monkeypatch.setattr(batches, "_held", measured)
    requests = Requests(text, Attention(SIZE**-0.5), 0)
    for more in ([20, 30, 60, 0, 90, 10], [30, 2, 9, 60, 50, 5], [50, 60, 80, 2, 9, 40], [200] * 6):
        requests.run(more)
    requests.check()
    assert max(sizes) <= limit / 2, "the other half is for rows that are padded"
    assert len(sizes) > 3 * 2, "and so there is more than one call for rows of one length"


@pytest.mark.parametrize("varlen", [True, False])
def test_rows_stay_whole_where_few_keys_are_gathered(varlen, monkeypatch):
    """By hand: 100 keys, as many again where rows are padded; a row with more is alone, rows that begin gather none."""
    monkeypatch.setattr(reads, "_HELD_BYTES", 100 * 8 * (1 if varlen else 2))
    sizes = Sizes(room=500, slots=501, heads=6, slot_bytes=8, varlen=varlen, gpu=True)
    assert sizes.shared(2) == sizes, "layers whose keys take other memory need other plans"
    assert Sizes(50, 51, 6, 8, varlen, True).shared(2).slot_bytes == 0
    blocks = torch.arange(5)
    rows = [Row(n, 10 * n, 10, seen) for n, seen in enumerate((20, 20, 20, 300, 30))]
    fits = plan(blocks, rows, sizes).fits
    assert [fit.ends.tolist() for fit in fits] == [[0, 1, 2], [3], [4]]
    assert [len(fit.keys[0]) for fit in fits] == [90, 310, 40]
    assert torch.cat([fit.block for fit in fits]).tolist() == [row.number for row in rows for _ in range(10)]
    fits = plan(blocks, [row._replace(seen=0, size=10) for row in rows] * 5, sizes).fits
    assert [fit.keys for fit in fits] == [None]


def test_rows_are_cut_where_one_has_no_chunk_left():
    """300, 200 and 20 tokens beyond their slots: chunks of 128 with 3, 2 and 1 rows, none of them empty."""
    rows = [Row(0, 0, 300, 48), Row(1, 300, 200, 90), Row(2, 500, 20, 48)]
    sizes = Sizes(room=48, slots=49, heads=6, slot_bytes=100, varlen=False, gpu=False)
    work = plan(torch.tensor([7, 3, 5]), rows, sizes)
    assert work.fits == []
    assert [tuple(segment.tokens.shape) for segment in work.segments] == [(3, 128), (2, 128), (1, 44)]
    assert [segment.blocks.tolist() for segment in work.segments] == [[7, 3, 5], [7, 3], [7]]
    assert [segment.seen.tolist() for segment in work.segments] == [[48, 90, 48], [176, 218], [304]]
    places = torch.cat([segment.places for segment in work.segments])
    assert sorted(places.tolist()) == list(range(520)), "every token has one output"


def test_what_fits_goes_first():
    """A prompt longer than the slots: ordinary attention up to the capacity, chunks for the rest."""
    sizes = Sizes(room=48, slots=49, heads=6, slot_bytes=100, varlen=True, gpu=True)
    work = plan(torch.tensor([7, 3]), [Row(0, 0, 60, 0), Row(1, 60, 10, 30)], sizes)
    (fit,), (segment,) = work.fits, work.segments
    assert fit.query_starts.tolist() == [0, 48, 58]
    assert fit.key_starts.tolist() == [0, 48, 88]
    assert fit.begins.tolist() == [7]
    assert fit.next.tolist() == [48, 40]
    assert segment.places.tolist() == list(range(48, 60))
    assert segment.tokens.shape == (1, 64), "a compiled length"
    assert segment.least == 48


@pytest.mark.parametrize("text", ["tova:48", "tova:48,gain=value_norm", "tova:48,kv=int8", "tova:48,residual=0.9"])
def test_a_prompt_that_fits_leaves_no_nan_in_its_block(text):
    """A step on a GPU multiplies what lies in empty slots by 0; here it is what an earlier request has left."""
    requests = Requests(text, Attention(SIZE**-0.5), 0)
    requests.run([20, 10, 0, 0, 0, 0])
    for home in requests.homes[:2]:
        values = requests.blocks.stored[-1][home]
        assert values.isfinite().all()
        assert requests.blocks.gains is None or requests.blocks.gains[home].isfinite().all()


@pytest.mark.parametrize("text", ["tova:48", "fade:30|fade:48|fade:70"])
def test_layers_share_their_indices_and_read_nothing_back(monkeypatch, text):
    """The host knows all that it needs: no layer, or KV head with a budget, asks the device for a number."""
    requests = Requests(text, Attention(SIZE**-0.5), 0)
    requests.mixed(3)
    seen, sizes = requests.seen, [60, 1, 30]
    batch = batch_of(torch.tensor(requests.homes[:3]), torch.tensor(seen[:3]), [0, 60, 61, 91], seen[:3])
    new = [torch.randn(sum(sizes), n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS)]
    arguments = (*new, requests.policy, requests.attention, torch.empty_like(new[0]))
    attend(requests.blocks, batch, *arguments)
    (work,) = batch.plans.values()

    def refuse(*_: object) -> None:
        raise AssertionError("a layer waits for the device")

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(reads, "plan", refuse)
    attend(requests.blocks, batch, *arguments)
    assert list(batch.plans.values()) == [work]


@pytest.mark.parametrize("together", [False, True])
def test_a_warm_up_needs_no_blocks_of_vllms(together, monkeypatch):
    """What runs in vLLM's memory profile on a GPU: reads and steps on memory of its own."""
    monkeypatch.setattr(head_groups, "_together", lambda _: together)
    monkeypatch.setattr(warmup, "_token_counts", {})
    for text in ("tova:48", "h2o:48,gain=value_norm", "fade:30|fade:48|fade:30"):
        layout = Layout(parse_layer_policy(text), HEADS, KV_HEADS, SIZE, SIZE, torch.float32)
        new = [torch.randn(256, n, SIZE) for n in (HEADS, KV_HEADS, KV_HEADS)]
        for count in (5, 256):  # fewer tokens than any graph has, too
            warm_up(layout, *(tensor[:count] for tensor in new), Attention(SIZE**-0.5), requests=9, kinds=2)


@pytest.mark.parametrize("gpu, most", [(False, 30), (True, 16)])
def test_a_plan_depends_on_slots_only_where_memory_is_short(monkeypatch, gpu, most):
    """30 rows; on a GPU no more than 16 are read at once."""
    sizes = Sizes(room=0, slots=513, heads=32, slot_bytes=4096, varlen=True, gpu=gpu)
    assert sizes.shared(30) == sizes._replace(slots=99, heads=8).shared(30)
    chunk = reads.TAILS[-1] if gpu else reads.CHUNK
    row = sizes._row_bytes(chunk)
    monkeypatch.setattr(reads, "_BYTES", row * most)
    assert sizes.shared(30) != sizes
    monkeypatch.setattr(reads, "_BYTES", row * most - 1)
    assert sizes.shared(30) == sizes
    assert sizes.shared(most - 1) != sizes


def test_every_group_of_rows_finds_a_graph():
    """40 prompts of 200 tokens: no more rows at once than the largest graph has, each group in a captured shape."""
    rows = [Row(number, 200 * number, 200, 600) for number in range(40)]
    sizes = Sizes(room=512, slots=513, heads=32, slot_bytes=4096, varlen=True, gpu=True)
    shapes = [tuple(segment.tokens.shape) for segment in plan(torch.arange(40), rows, sizes).segments]
    assert shapes == [(16, 256), (16, 256), (8, 256)]
    captured = [shape for shape in reads.graph_shapes(8192) if shape[0] <= sizes.graph_rows()]
    assert set(shapes) <= set(captured)


def test_many_kinds_of_layers_share_the_rows_of_graphs():
    """A profile gives every layer a capacity, and so graphs, of its own: fewer for each, and never none."""
    rows = {kinds: sorted({rows for rows, _ in reads.graph_shapes(8192, kinds)}) for kinds in (1, 2, 4, 32, 300)}
    assert rows == {1: [1, 2, 4, 8, 16], 2: [1, 2, 4, 8], 4: [1, 2, 4], 32: [1], 300: [1]}
    assert {width for _, width in reads.graph_shapes(8192, 32)} == {64, *reads.GRAPHS}


@pytest.mark.parametrize("slots, heads", [(513, 32), (1025, 32), (4097, 64), (16385, 32)])
def test_graphs_hold_little_memory(slots, heads):
    """vLLM's allocator splits no large block in its memory profile, so graphs of other rows share none: all add up."""
    sizes = Sizes(room=0, slots=slots, heads=heads, slot_bytes=4096, varlen=True, gpu=True)
    rows = {rows for rows, _ in reads.graph_shapes(8192) if rows <= sizes.graph_rows()}
    logits = 4 * heads * 256 * (slots + 256)
    assert 1 in rows
    assert sum(rows) * logits <= 1 << 30
