"""Messages of a reading: they must say what the trace, the perplexity and the cost say."""

import base64

import numpy as np
import pytest
import torch

import msrnn
from msrnn.eval.perplexity import perplexity
from msrnn.hf.geometry import geometry
from msrnn.plan import per_layer
from msrnn.play.ask import by_words
from msrnn.play.reading import NOBODY, Reading, pack_scores, record
from msrnn.play.tokens import TokenText
from tests.support import tiny_eval

TEXT = tiny_eval.prose(60, 4)
BY_HEAD = per_layer("fade", [[5, 40], [30, 6]])


@pytest.fixture(scope="module")
def model():
    return tiny_eval.model()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_eval.tokenizer()


@pytest.mark.parametrize("policy", ["tova:20", "h2o:20", "window+4:20", "tova-query-head:12", BY_HEAD], ids=str)
def test_a_recording_has_the_deaths_of_the_trace(model, tokenizer, policy):
    ids = tokenizer(TEXT).input_ids
    rnn = msrnn.RNN(model, policy)
    _, trace = record(rnn, tokenizer, ids, str(policy))
    _, state = rnn.read(torch.tensor(ids), rnn.start(trace=True))
    for layer, deaths in enumerate(state.trace.deaths):
        assert torch.equal(trace.deaths[layer], deaths)


def test_a_recording_has_the_perplexity_and_the_bytes(model, tokenizer):
    ids = tokenizer(TEXT).input_ids
    recording, _ = record(msrnn.RNN(model, "tova:20"), tokenizer, ids, "tova:20")
    lanes = [piece["lanes"][0] for piece in recording["pieces"]]
    nll = np.concatenate([np.frombuffer(base64.b64decode(lane["nll"]), "<f4") for lane in lanes])
    assert np.isnan(nll[0])
    assert float(nll[1:].sum()) == pytest.approx(perplexity(model, ids, "tova:20").nll, rel=1e-4)
    assert lanes[-1]["bytes"] == lanes[0]["bytes"]
    slot = sum(layer.slot_bytes(model.dtype) for layer in geometry(model))
    assert recording["pieces"][-1]["full_bytes"] == len(ids) * slot
    assert "".join(token for piece in recording["pieces"] for token in piece["tokens"]) == TEXT


def test_a_recording_has_the_capacities_and_slots_of_every_kv_head(model, tokenizer):
    recording, _ = record(msrnn.RNN(model, BY_HEAD), tokenizer, tokenizer(TEXT).input_ids, str(BY_HEAD))
    lane = recording["meta"]["lanes"][0]
    assert lane["policy"] == "fade:avg=20.25"
    assert lane["capacities"] == [[5, 40], [30, 6]]
    assert (lane["first"], lane["last"]) == ([[0, 0], [0, 0]], [[2, 20], [15, 3]])
    assert lane["units"] == [2, 2]
    slots = [[len(unit["positions"]) for unit in layer["units"]] for layer in recording["slots"][0]]
    assert slots == [[5, 40], [30, 6]]


def test_full_attention_stops_where_it_was_told_to(model):
    reading = Reading.start(model, ["tova:8"], full_tokens=10)
    pieces = [reading.feed([1, 2, 3, 4, 5, 6], ["x"] * 6) for _ in range(3)]
    assert ["full" in piece for piece in pieces] == [True, False, False]
    assert reading.full.seen == 6


def test_a_step_without_eviction_is_marked(model):
    reading = Reading.start(model, ["tova:8"])
    left = np.frombuffer(base64.b64decode(reading.feed(range(1, 7), "abcdef")["lanes"][0]["left"]), "<u2")
    assert (left == NOBODY).all()
    left = np.frombuffer(base64.b64decode(reading.feed(range(1, 7), "abcdef")["lanes"][0]["left"]), "<u2").reshape(2, 6)
    assert (left[:, :2] == NOBODY).all()
    assert (left[:, 2:] != NOBODY).all()


def test_scores_survive_packing():
    scores = np.array([0.0, 1.0, 3.14159e-7, 0.0123, -0.75, 812.0], np.float32)
    unpacked = (pack_scores(scores).astype("<u4") << 16).view("<f4")
    np.testing.assert_allclose(unpacked, scores, rtol=0.004)


@pytest.mark.parametrize("text", ["plain words", "Grüße 🙂🙂 an 東京 und עברית", "tab\tline\n\n\nend  ", "a" * 50])
def test_token_texts_join_to_the_text(tokenizer, text):
    decode = TokenText(tokenizer)
    assert "".join(decode(token) for token in tokenizer(text).input_ids) == text


def test_words_locate_the_passage_with_the_rare_ones():
    tokens = ("word " * 200 + "the lantern is green " + "word " * 200).split(" ")
    passages = by_words([f"{token} " for token in tokens], "Where is the green lantern? word")
    assert passages[0]["start"] <= 200 <= passages[0]["end"]
