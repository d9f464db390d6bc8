"""The league of online policies: every score in the same exact recurrence, at the same number of slots.

    python experiments/league.py --data DATA --dtype bfloat16 --chunks 6 --batch 84 --minutes 6
    python experiments/league.py --data DATA --dtype bfloat16 --chunks 6 --batch 14 --same-bytes results/league.jsonl
        --out results/part/league_bytes.jsonl

PG-19 perplexity at each --capacity, then recall of numbers (needle) and of facts in conversations (turns) at the
first. Every score stands in a frame: which tokens are protected, and who decides together. Built-in policies have
theirs; a research rule (`msrnn/rules/`) is measured in TOVA's (nothing protected, the heads of a layer together) and in
fade's (the first 4 tokens and the newest half protected, each KV head alone), and the one with the lower perplexity on
the choosing half of the books stands for it. All 14 books go through one batch, since on a GPU a rule's time is that
of its kernel launches; the halves (see books.py) are told apart afterwards. A run that was stopped resumes.

--same-bytes: the policies of such records again, on the reporting half, each with as many slots as fit into the bytes
of TOVA's state.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from books import (
    Losses,
    Sums,
    Texts,
    interval,
    load_model,
    measurements_path,
    novels,
    options,
    records,
    save,
    show,
    split,
)

from msrnn.analysis.league import league_table, size_of
from msrnn.analysis.league import players as best_frames
from msrnn.analysis.records import models, read_results
from msrnn.core.attention import Attention
from msrnn.core.rules import memory_size
from msrnn.core.slots import Columns, unit_count
from msrnn.eval.experiment import Experiment
from msrnn.eval.record import write_records
from msrnn.eval.run import run
from msrnn.eval.tasks import needle, turns
from msrnn.hf.load import bundled, config
from msrnn.kernels.torch.rule_graph import scan as graph_scan
from msrnn.kernels.torch.scan import scan as eager_scan
from msrnn.policy import parse_policy, split_policy

BUILT_IN = ("window+4", "h2o", "h2o-layer", "tova", "tova-head", "fade", "tova,gain=value_norm", "fade,gain=value_norm")
RULES = (
    "random", "key_norm", "value_norm", "key_difference", "redundancy", "lagged", "window_attention", "output_aware",
)  # fmt: skip
FRAMES = ("{}-head+4,last=1/2", "{}")
FADING = ("output_aware-head,last=1/2,momentum=1-1.5/k", "window_attention-head,last=1/2")
SCORES = (
    *("tova", "fade", "tova,gain=value_norm", "fade,gain=value_norm", FADING[0], "output_aware", FADING[1]),
    *("h2o", "window+4"),
)  # fmt: skip
NEEDLE = needle.Settings(lengths=(1024, 2048), repeats=10)
TURNS = turns.Settings(turns=(0, 2, 4, 8), conversations=40)


def kinds(scores_only: bool) -> list[str]:
    """Everything that is measured, the built-in policies first."""
    if scores_only:
        return list(SCORES)
    return [*BUILT_IN, *FADING, *(kind for rule in RULES for kind in frames(rule))]


def frames(rule: str) -> list[str]:
    """A lagged score needs protected tokens to compare with, so it has fade's frame only."""
    return [frame.format(rule) for frame in FRAMES if rule != "lagged" or "last" in frame]


def sized(kind: str, capacity: int) -> str:
    return split_policy(kind).with_size(capacity)


class Halves:
    """The losses of all books, told apart by half."""

    def __init__(self, losses: Losses, choosing: Iterable[str], deadline: float) -> None:
        self.losses, self.deadline = losses, deadline
        chosen = set(choosing)
        self.parts = {
            "choosing": losses.subset(name for name in losses.texts if name in chosen),
            "reporting": losses.subset(name for name in losses.texts if name not in chosen),
        }

    def measure(self, policies: Sequence[str]) -> list[str]:
        """Those that are measured, now or before; nothing begins after the deadline."""
        done = []
        for policy in policies:
            if policy not in self.losses.measurements:
                if time.monotonic() > self.deadline:
                    continue
                self.losses.of(policy)
                print(f"{policy:58} {self.losses.measurements[policy]['seconds']:7.1f} s", flush=True)
            done.append(policy)
        return done

    def sums(self, policy: str, half: str) -> Sums:
        return self.parts[half].of(policy)

    def gap(self, policy: str, half: str) -> tuple[float, float, float]:
        return interval(lambda full, ours: ours - full, self.sums("full", half), self.sums(policy, half))

    def ratio(self, policy: str, rival: str, half: str) -> tuple[float, float, float]:
        sums = (self.sums(name, half) for name in ("full", policy, rival))
        return interval(lambda full, ours, theirs: (ours - full) / (theirs - full), *sums)


def league(halves: Halves, capacity: int, scores_only: bool) -> list[str]:
    """One policy per score: of a rule's frames the better one on the choosing half."""
    measured = halves.measure([sized(kind, capacity) for kind in kinds(scores_only)])
    if scores_only:
        return measured
    players = [policy for policy in measured if split_policy(policy).kind in (*BUILT_IN, *FADING)]
    for rule in RULES:
        candidates = [sized(kind, capacity) for kind in frames(rule) if sized(kind, capacity) in measured]
        players += sorted(candidates, key=lambda policy: halves.gap(policy, "choosing")[0])[:1]
    return players


def with_everybody(players: Sequence[str], capacity: int) -> list[str]:
    """Also those whose perplexity is not measured here; a rule stands in fade's frame, the better one of every rule."""
    built_in = [sized(kind, capacity) for kind in (*BUILT_IN, *FADING)]
    everybody = [*players, *(policy for policy in built_in if policy not in players)]
    present = {split_policy(policy).kind.split("-")[0] for policy in everybody}
    return [*everybody, *(sized(frames(rule)[0], capacity) for rule in RULES if rule not in present)]


def table(halves: Halves, players: Sequence[str], capacity: int) -> str:
    tova = f"tova:{capacity}"
    lines = [f"{'policy':58} {'choosing':>9} {'gap on the reporting half':>26} {'relative to tova':>26}"]
    for policy in sorted(players, key=lambda policy: halves.gap(policy, "reporting")[0]):
        ratio = show(halves.ratio(policy, tova, "reporting")) if tova in players else ""
        choosing, reporting = halves.gap(policy, "choosing")[0], show(halves.gap(policy, "reporting"))
        lines.append(f"{policy:58} {choosing:9.3f} {reporting:>26} {ratio:>26}")
    return "\n".join(lines)


def half_records(halves: Halves, policies: Iterable[str], settings: dict[str, Any]) -> list[Any]:
    """A record per policy and half."""
    measured = []
    for half, losses in halves.parts.items():
        labels = {policy: (policy, _slots(policy)) for policy in ("full", *policies)}
        ours = records(losses, f"league-{half}", labels, settings | {"books": list(losses.texts)})
        measured += [replace(record, cell={"half": half}) for record in ours]
    return measured


def chunks(tokenizer: Any, books: Sequence[Path], arguments: argparse.Namespace) -> Texts:
    """Chunks of every book, each after BOS where the tokenizer has one."""
    bos = torch.tensor(tokenizer("")["input_ids"], dtype=torch.long)
    texts = novels(tokenizer, books, arguments.length - len(bos), arguments.chunks)
    return {name: torch.cat([bos.expand(len(rows), -1), rows], 1) for name, rows in texts.items()}


def _slots(policy: str) -> int | None:
    size = split_policy(policy).size
    return int(size) if size else None


def recall(
    task: str, players: Sequence[str], arguments: argparse.Namespace, model: Any, tokenizer: Any, deadline: float
) -> None:
    """Recall of all players, with intervals; one policy after the other, so that a stopped run has whole rows."""
    settings: Any = {"needle": replace(NEEDLE, repeats=arguments.repeats), "turns": TURNS}[task]
    if arguments.limit:
        settings = replace(settings, **({"repeats": 1} if task == "needle" else {"conversations": 1, "turns": (0, 2)}))
    log = arguments.out.with_name(f"{arguments.out.stem}.{task}.jsonl")
    for policy in (*players, "full"):
        left = (deadline - time.monotonic()) / 60
        if left <= 0:
            return
        experiment = Experiment(task, (policy,), batch=arguments.prompts, data=str(arguments.data), settings=settings)
        start = time.perf_counter()
        done = run(experiment, model, tokenizer, log, minutes=left, quiet=True)
        write_records(arguments.out, [replace(record, task=f"league-{task}") for record in done])
        if done:
            values = [record.value for record in done]
            seconds = time.perf_counter() - start
            print(f"{task:8} {policy:50} {sum(values) / len(values):6.3f} {seconds:7.1f} s", flush=True)


def same_bytes(arguments: argparse.Namespace, model: Any, tokenizer: Any, deadline: float) -> None:
    """The reporting half again: every policy with the slots that fit into TOVA's bytes, in the order of the table."""
    _, books = split(arguments.data)
    texts = chunks(tokenizer, books[: arguments.limit], arguments)
    losses = Losses(model, texts, arguments.batch, measurements_path(arguments, "bytes"), "reporting half")
    for capacity in arguments.capacity:
        known = [player.policy for player in best_frames(read_results([arguments.same_bytes]), capacity)]
        slots = {policy: size_of(policy, model.config, model.dtype).slots for policy in known}
        fitted = {split_policy(policy).with_size(size): size for policy, size in slots.items()}
        for policy in ("full", *fitted):
            if time.monotonic() < deadline:
                losses.of(policy)
        measured = {p: (p, size) for p, size in fitted.items() if p in losses.measurements}
        settings = {"length": arguments.length, "chunks": arguments.chunks, "plain_slots": capacity}
        save(arguments.out, records(losses, "league-bytes", {"full": ("full", None)} | measured, settings))


def check_graphs() -> None:
    """On a GPU a rule's scan is a CUDA graph: it must decide as the same scan does kernel by kernel."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows, slots, batch, heads, kv_heads, size = 32, 48, 4, 6, 2, 16
    steps = torch.arange(slots, slots + rows, device="cuda").expand(batch, -1)
    for kind in (kind for rule in RULES for kind in frames(rule)):
        policy = parse_policy(sized(kind, slots))
        units = unit_count(policy, heads, kv_heads)
        for _ in range(2):  # captured, then replayed with other numbers
            keys = torch.randn(2, batch, kv_heads, slots + rows, size, device="cuda", generator=generator)
            positions = torch.arange(slots + rows, device="cuda").expand(batch, units, -1).contiguous()
            scores = torch.zeros(batch, units, slots + rows, device="cuda")
            memory = scores.new_zeros(*scores.shape, memory_size(policy)) if memory_size(policy) else None
            columns = Columns(keys[0], keys[1], positions, scores, memory=memory)
            logits = torch.randn(batch, heads, rows, slots + rows, device="cuda", generator=generator)
            ours, theirs = (scan(logits, columns, steps, policy, Attention(1.0)) for scan in (graph_scan, eager_scan))
            if not torch.equal(ours.expiry, theirs.expiry):
                raise SystemExit(
                    f"{policy}: the CUDA graph evicts other tokens; run with MSRNN_OPS=eager and report it"
                )


def print_tables(arguments: argparse.Namespace) -> None:
    """A table for every model that has records of the capacity, with bytes for the one that ships."""
    everything, shipped = read_results([arguments.out]), bundled()
    for model, capacity in product(models(everything), arguments.capacity):
        records = [one for one in everything if one.model == model]
        if any(one.capacity == capacity for one in records):
            shape = config(str(shipped)) if model == shipped.name else None
            print(f"\n{model}, {capacity:,} slots\n\n{league_table(records, capacity, shape)}")


def parse() -> argparse.Namespace:
    parser = options(__doc__ or "", "results/league.jsonl")
    parser.add_argument("--capacity", type=int, action="append", help="default: 256; recall is measured at the first")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing begins after so long")
    parser.add_argument("--tasks", nargs="*", default=["needle", "turns"], help="besides perplexity")
    parser.add_argument("--prompts", type=int, default=200, help="prompts read at once")
    parser.add_argument("--repeats", type=int, default=NEEDLE.repeats, help="numbers to find at each depth and length")
    parser.add_argument("--scores", action="store_true", help="only the scores that might become presets")
    parser.add_argument("--recall", action="store_true", help="only the other tasks; perplexity as measured before")
    parser.add_argument("--players", nargs="+", default=[""], help="with --recall: whose names begin so, in this order")
    parser.add_argument("--table", action="store_true", help="print the table of docs/league.md from the records")
    parser.add_argument("--same-bytes", type=Path, metavar="RECORDS", help="their policies in TOVA's bytes")
    parser.add_argument("--limit", type=int, help="so many books of each half: a trial")
    arguments = parser.parse_args()
    arguments.capacity = arguments.capacity or [256]
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.table:
        print_tables(arguments)
        return
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.device == "cuda":
        check_graphs()
    model, tokenizer = load_model(arguments)
    if arguments.same_bytes:
        same_bytes(arguments, model, tokenizer, deadline)
        return
    choosing, reporting = (books[: arguments.limit] for books in split(arguments.data))
    texts = chunks(tokenizer, [*choosing, *reporting], arguments)
    losses = Losses(model, texts, arguments.batch, measurements_path(arguments, "pg19"), "both halves")
    halves = Halves(losses, [book.stem for book in choosing], time.monotonic() if arguments.recall else deadline)
    halves.measure(["full"])
    settings = {"length": arguments.length, "chunks": arguments.chunks}
    for capacity in arguments.capacity:
        players = league(halves, capacity, arguments.scores)
        print(f"\n{capacity} slots, {len(losses.texts)} books\n{table(halves, players, capacity)}\n", flush=True)
        measured = [sized(kind, capacity) for kind in kinds(arguments.scores)]
        if "full" in losses.measurements:
            save(arguments.out, half_records(halves, [p for p in measured if p in losses.measurements], settings))
        if arguments.recall and not arguments.scores:
            players = with_everybody(players, capacity)
            players = [policy for name in arguments.players for policy in players if policy.startswith(name)]
        for task in arguments.tasks if capacity == arguments.capacity[0] else ():
            recall(task, players, arguments, model, tokenizer, deadline)


if __name__ == "__main__":
    main()
