"""The paper's own numbers (arXiv 2401.06104 v2), shown beside ours; other models, so compare orders and shapes."""

from __future__ import annotations

from ..eval.record import Record

MODEL = "LLaMA-2-7B"

# table 3: PG-19 perplexity by multi-state size
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
PERPLEXITY: dict[str, tuple[float, ...]] = {
    "full": (7.16,) * 7,
    "baseline": (17.65, 12.97, 10.39, 8.92, 8.04, 7.50, 7.16),
    "window": (4812.27, 4025.01, 3275.58, 2184.62, 1001.29, 240.17, 7.16),
    "window+1": (10.20, 8.97, 8.22, 7.76, 7.50, 7.33, 7.16),
    "window+4": (10.28, 8.98, 8.19, 7.73, 7.46, 7.30, 7.16),
    "h2o": (10.22, 8.97, 8.21, 7.75, 7.49, 7.32, 7.16),
    "h2o-layer": (10.20, 8.97, 8.22, 7.76, 7.50, 7.33, 7.16),
    "tova-head": (11.13, 9.55, 8.69, 7.90, 7.52, 7.27, 7.16),
    "tova": (9.53, 8.32, 7.71, 7.41, 7.25, 7.17, 7.16),
    "tova+1": (9.53, 8.31, 7.71, 7.41, 7.25, 7.17, 7.16),
    "tova+4": (9.63, 8.33, 7.72, 7.41, 7.25, 7.17, 7.16),
}

# table 1: one V100, sequences of 4,096
SPEED_SIZES = (256, 512, 1024, 2048, 4096)
MEMORY_GB = (0.15, 0.28, 0.56, 1.11, 2.18)
LARGEST_BATCH = (139, 70, 35, 17, 8)
THROUGHPUT = (8.5, 4.8, 3.1, 1.7, 1.0)  # relative, at that batch

# section 7.3: mean steps kept by word class, and recency
LENGTH = 4096  # tokens of each text
WORD_SIZES = (256, 512, 1024, 2048)
STEPS_KEPT: dict[str, tuple[int, ...]] = {
    "all": (249, 481, 897, 1537),
    "POS": (1134, 1393, 1736, 2061),
    "''": (845, 1101, 1413, 1774),
    "$": (329, 724, 1276, 2123),
    ")": (379, 670, 1161, 1558),
    ".": (350, 645, 1117, 1677),
    "NNPS": (321, 578, 1042, 1671),
    "newline": (303, 550, 969, 1538),
    "DT": (190, 379, 734, 1363),
    "TO": (182, 368, 734, 1363),
}
RECENT_SHARE = (0.73, 0.76)

# section 6.3: TOVA wins, ties, full wins, in per cent; mean length in tokens
STORIES = {256: (6, 47, 47), 512: (10, 71, 19), 1024: (5, 88, 6)}
STORY_TOKENS: dict[int | None, int] = {256: 1361, 512: 1503, 1024: 1566, None: 1566}

UNDERSTANDING = {
    "squality": "within one ROUGE point of full at 1/4 (Mistral, Yi) or 1/8 (LLaMA-2) of the context",
    "qasper": "within one F1 point of full at 1/2 of the context",
}
EXTRAPOLATION = "with 512 slots, TOVA stays within 0.5 of its short-context perplexity to 70K tokens, below window+4"


def perplexity(family: str, size: float | None) -> float | None:
    """The paper's perplexity of a policy at a size, where it has one."""
    line = PERPLEXITY.get(family)
    if line is None:
        return None
    if family == "full":
        return line[0]
    return line[SIZES.index(int(size))] if size in SIZES else None


def steps_kept(name: str, record: Record | None) -> int | None:
    """The paper's mean steps of a class for a record: of TOVA at one of its sizes, on texts of the same length."""
    line = STEPS_KEPT.get(name)
    if line is None or record is None or record.settings.get("length") != LENGTH:
        return None
    tova = record.policy == f"tova:{record.capacity:g}" if record.capacity else False
    return line[WORD_SIZES.index(int(record.capacity or 0))] if tova and record.capacity in WORD_SIZES else None
