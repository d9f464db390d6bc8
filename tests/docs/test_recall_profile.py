"""What docs/budgets.md says of the profile for recall is what the records say."""

from __future__ import annotations

from tests.docs import pages
from tests.docs.records import load

RECORDS = load("part/recall_profile")
WORDS = " ".join(pages.text("docs/budgets.md").split())
PLAIN, RECALL = "best:256", "best:256,profile=SmolLM2-135M-Instruct-recall"


def recalled(task: str, policy: str) -> tuple[int, int]:
    """How many of how many."""
    records = [one for one in RECORDS if (one["task"], one["policy"]) == (task, policy)]
    return round(sum(one["value"] * one["samples"] for one in records)), sum(one["samples"] for one in records)


def test_recall_and_perplexity() -> None:
    (ours, count), (plain, same) = recalled("needle", RECALL), recalled("needle", PLAIN)
    assert count == same
    assert f"{ours} of {count} passkeys in 2,048 tokens ({plain})" in WORDS
    (ours, count), (plain, same) = recalled("turns", RECALL), recalled("turns", PLAIN)
    assert count == same
    assert f"{ours / count:.2f} of {count} facts after two turns ({plain / count:.2f})" in WORDS
    values = {one["policy"]: one["value"] for one in RECORDS if one["task"] == "best-reporting"}
    full, tova = values.pop("full"), values.pop("tova:256")
    plain, ours = sorted(values.values())
    assert next(name for name, value in values.items() if value == ours).endswith("-recall")
    assert f"a gap of {ours - full:.2f} perplexity points ({plain - full:.2f}) to full attention" in WORDS
    assert f"where `tova:256` has {tova - full:.2f}" in WORDS
