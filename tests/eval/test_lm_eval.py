"""The public harness drives a bounded model: its own `hf` model is the judge of the unbounded case."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.functional import log_softmax

from tests.support import tiny_eval

pytest.importorskip("lm_eval", reason="the extra 'lm-eval' is not installed")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from msrnn.eval.lm_eval import BoundedLM
from msrnn.eval.perplexity import token_nll

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = [("the old captain", " wept"), ("stone and stone and river", " and lantern"), ("", "never said"), ("a", "b")]


def bounded_lm(policy: str, **settings: object) -> BoundedLM:
    return BoundedLM(tiny_eval.model(), policy, tokenizer=tiny_eval.tokenizer(), **settings)


def ask(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_likelihoods_are_the_plain_models_where_nothing_leaves():
    lm = bounded_lm("tova:400", batch_size=3)
    results = lm.loglikelihood([ask("loglikelihood", *pair) for pair in PAIRS], disable_tqdm=True)
    plain, encode = tiny_eval.model(), tiny_eval.tokenizer()
    for (context, continuation), (total, greedy) in zip(PAIRS, results, strict=True):
        before, after = encode(context)["input_ids"] or [lm.prefix_token_id], encode(continuation)["input_ids"]
        with torch.no_grad():
            logits = plain(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        chances = log_softmax(logits, -1)
        assert total == pytest.approx(float(chances.gather(1, torch.tensor(after)[:, None]).sum()), abs=1e-3)
        assert greedy == (chances.argmax(-1).tolist() == after)


def test_a_bound_is_felt_and_a_batch_changes_nothing():
    pairs = [ask("loglikelihood", *pair) for pair in PAIRS]
    alone = bounded_lm("tova:8").loglikelihood(pairs, disable_tqdm=True)
    together = bounded_lm("tova:8", batch_size=4).loglikelihood(pairs, disable_tqdm=True)
    for one, other in zip(alone, together, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
    free = bounded_lm("full").loglikelihood(pairs, disable_tqdm=True)
    assert abs(alone[1][0] - free[1][0]) > 0.1


def test_a_whole_text_is_read_in_one_go():
    text, lm = tiny_eval.prose(40, 1), bounded_lm("tova:8")
    results = lm.loglikelihood_rolling([ask("loglikelihood_rolling", text)], disable_tqdm=True)
    ids = torch.tensor([[lm.prefix_token_id, *tiny_eval.tokenizer()(text)["input_ids"]]])
    assert results == [pytest.approx(-float(token_nll(lm.model, ids, "tova:8").sum()), rel=1e-5)]


def test_answers_stop_where_they_are_told_to():
    lm = bounded_lm("tova:8")
    whole = lm.generate_until(
        [ask("generate_until", "the river", {"until": [], "max_gen_toks": 12})], disable_tqdm=True
    )[0]
    stop = whole[5]
    cut = lm.generate_until(
        [ask("generate_until", "the river", {"until": [stop], "max_gen_toks": 12})], disable_tqdm=True
    )
    assert cut == [whole[: whole.index(stop)]]


@pytest.mark.slow
def test_the_harness_runs_a_task_and_agrees_with_its_own_model(tmp_path):
    rows = [{"text": tiny_eval.prose(20, n), "choices": ["river", "stone"], "label": n % 2} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    from lm_eval.models.huggingface import HFLM

    scores = []
    for lm in (
        bounded_lm("tova:400"),
        HFLM(tiny_eval.model(), tokenizer=tiny_eval.tokenizer(), batch_size=1, device="cpu"),
    ):
        manager = TaskManager(include_defaults=False)
        results = simple_evaluate(lm, tasks=[dict(task)], task_manager=manager, bootstrap_iters=0, verbosity="ERROR")
        samples = results["samples"]["tiny_choice"]
        scores.append([answer[0] for sample in samples for answer in sample["filtered_resps"]])
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


@pytest.mark.parametrize(
    "settings, said",
    [({"batch_size": "auto"}, "batch_size is 'auto'"), ({"policy": "tovaa:3"}, "unknown policy 'tovaa:3'")],
)
def test_what_it_cannot_take_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        BoundedLM(tiny_eval.model(), tokenizer=tiny_eval.tokenizer(), **settings)


def test_the_harness_knows_it_by_name():
    from lm_eval.api.registry import get_model

    assert get_model("msrnn") is BoundedLM


def test_a_model_without_its_tokenizer_is_refused():
    with pytest.raises(ValueError, match="without its tokenizer"):
        BoundedLM(tiny_eval.model())
