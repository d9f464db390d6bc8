"""The page in a real Chromium: what a person does with it, and what must not go wrong."""

from __future__ import annotations

import json
import re
import time

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from msrnn.play import runs
from msrnn.play.settings import Limits
from tests.support.tiny_eval import prose

pytestmark = pytest.mark.slow

TEXT = prose(70, 3)


def begin(
    page, client, text: str | None = TEXT, *, speed: str = "", second: bool = False, wait: str = "All read"
) -> None:
    page.goto(client.url)
    expect(page.locator("#source")).not_to_have_value("")
    if text is not None:
        page.fill("#source", text)
    if second:
        page.check("#second")
        page.fill('fieldset[data-lane="1"] .policy-text', "window+4:16")
    page.locator("#speed").evaluate("(element, value) => { element.value = value; }", speed)
    page.click("#start")
    if wait:
        expect(page.locator("#status")).to_have_text(wait, timeout=30_000)


def tokens_shown(page) -> int:
    return int(re.match(r"[\d,]+", page.inner_text("#clock"))[0].replace(",", ""))


def until_shown(page, tokens: int) -> None:
    script = "(tokens) => parseInt(document.querySelector('#clock').innerText.replaceAll(',', '')) >= tokens"
    page.wait_for_function(script, arg=tokens, timeout=20_000)


def all_shown(page) -> None:
    """Until the playhead has reached the last token."""
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    page.click("#live", force=True)
    expect(page.locator("#live")).to_be_disabled()


def violations(page) -> list[str]:
    results = Axe().run(page)
    return [f"{found['id']}: {found['nodes'][0]['html'][:200]}" for found in results.response["violations"]]


def no_sideways_scrolling(page) -> bool:
    return page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def test_the_example_is_ready_and_plays(page, client):
    page.goto(client.url)
    expect(page.locator("#source")).to_have_value(re.compile("Keeper of Gull Point"))
    expect(page.locator("#intro")).to_be_visible()
    page.locator("#speed").evaluate("(element) => { element.value = ''; }")
    page.click("#start")
    expect(page.locator("#status")).to_have_text("All read", timeout=60_000)
    all_shown(page)
    expect(page.locator("#clock")).to_have_text(re.compile(r"^6,\d\d\d of 6,\d\d\d tokens$"))
    expect(page.locator("#memory-now")).to_contain_text("bounded")
    expect(page.locator("#perplexity-now")).to_contain_text(
        re.compile(r"full, up to 4\d\d tokens")
    )  # of a context of 512
    expect(page.locator("#about")).to_contain_text("tova:16")
    assert page.locator(".line span").count() < 3000  # of more than 6,000: only what is in view exists
    assert page.locator("#setup").get_attribute("open") is None


def test_shades_and_tooltip_say_what_the_state_says(page, client):
    begin(page, client)
    all_shown(page)
    run = next(iter(client.server.scheduler.runs.values()))
    held = [set(run.reading.lanes[0].slots(layer)["units"][0]["positions"]) for layer in range(2)]
    total = run.reading.seen
    for token in (total - 1, total - 12, total - 60):
        span = page.locator(f'.line [data-token="{token}"]').first
        layers = sum(token in one for one in held)
        assert f"lv{layers * 4}" in span.get_attribute("class")
    left = next(token for token in range(total - 60, total) if all(token not in one for one in held))
    page.hover(f'.line [data-token="{left}"]')
    tip = page.locator("#tip")
    expect(tip).to_contain_text("Held by 0 of 2 layers")
    pieces = [json.loads(entry.split("\n", 1)[1]) for entry in run.log if entry.startswith("piece")]
    deaths = deaths_of(pieces, left)
    for layer, (step, score) in deaths.items():
        line = tip.locator("li").nth(layer)
        expect(line).to_contain_text(f"left at {step}")
        assert float(line.locator("i").inner_text()) == pytest.approx(score, rel=0.06)
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def deaths_of(pieces, token: int) -> dict[int, tuple[int, float]]:
    """When each layer dropped a token and its score then, from the messages; one unit a layer."""
    import base64

    import numpy as np

    found = {}
    for piece in pieces:
        count = len(piece["tokens"])
        lane = piece["lanes"][0]
        ages = np.frombuffer(base64.b64decode(lane["left"]), "<u2").reshape(-1, count).astype(int)
        scores = np.frombuffer(base64.b64decode(lane["scores"]), "<u2").astype("<u4") << 16
        for layer, column in np.argwhere(piece["start"] + np.arange(count) - ages == token):
            found[int(layer)] = (
                piece["start"] + int(column),
                float(scores.view("<f4").reshape(-1, count)[layer, column]),
            )
    return found


def test_pause_step_scrub_and_keys(page, client):
    begin(page, client, "x" * 600, speed="20", wait="")
    expect(page.locator("#clock")).to_have_text(re.compile(r"^\d\d+ "), timeout=20_000)
    page.click("#play")
    expect(page.locator("#status")).to_have_text("Paused")
    all_shown(page)
    before = tokens_shown(page)
    page.click("#step")
    expect(page.locator("#clock")).to_have_text(re.compile(f"^{before + 1} "))
    page.keyboard.press(".")
    expect(page.locator("#clock")).to_have_text(re.compile(f"^{before + 2} "))
    page.locator("#time").fill("5")
    expect(page.locator("#clock")).to_have_text(re.compile("^5 "))
    expect(page.locator(".line span:not(.ahead)")).to_have_count(5)
    page.locator("#status").click()
    page.keyboard.press("End")
    expect(page.locator("#clock")).to_have_text(re.compile(f"^{before + 2} "))
    page.locator(".lines").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#token")).to_contain_text(f"Token {before}")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#speed").select_option("")
    page.locator("#status").click()
    page.keyboard.press(" ")
    expect(page.locator("#status")).to_have_text("All read", timeout=30_000)


def test_two_policies_side_by_side_slots_and_a_question(page, client):
    begin(page, client, second=True)
    all_shown(page)
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator(".map canvas")).to_have_count(2)
    titles = page.locator(".pane h3").all_inner_texts()
    assert titles == ["tova:16", "window+4:16"]
    last = page.locator(".pane").nth(1).locator(".line span:not(.ahead)").last
    assert "lv8" in last.get_attribute("class")
    page.locator("#slots").scroll_into_view_if_needed()
    expect(page.locator("#slots .chip")).to_have_count(16)
    expect(page.locator("#slots-about")).to_contain_text("16 of 16 slots in use")
    expect(page.locator("#slots .lowest")).to_have_count(1)
    page.fill("#question", "Who wept?")
    page.click("#ask-form button")
    expect(page.locator(".sources h4")).to_contain_text("Sources", timeout=30_000)
    expect(page.locator(".answer")).to_have_count(3 if "full" in page.inner_text(".answer-list") else 2)
    assert re.search(r"forgotten by every layer|held by \d+ %", page.locator(".verdict").first.inner_text())
    page.locator(".jump").first.click()
    expect(page.locator("#token .token-name")).to_be_visible()
    assert violations(page) == []


def test_kv_heads_with_slots_of_their_own(page, playground, profile_by_head):
    client = playground(profiles=(profile_by_head,), policy=f"fade:16,profile={profile_by_head}")
    begin(page, client)
    all_shown(page)
    run = next(iter(client.server.scheduler.runs.values()))
    page.locator("#slots").scroll_into_view_if_needed()
    for layer, sizes in enumerate([[5, 27], [20, 12]]):
        page.fill("#slots-layer", str(layer))
        for head, size in enumerate(sizes):
            page.select_option("#slots-unit", str(head))
            expect(page.locator("#slots-about")).to_contain_text(f"{size} of {size} slots in use")
            expect(page.locator("#slots-about")).to_contain_text(f"but none of the newest {size // 2}.")
            expect(page.locator("#slots .chip")).to_have_count(size)
            unit, end = run.reading.lanes[0].slots(layer)["units"][head], run.reading.seen - size // 2
            free = [pair for pair in zip(unit["scores"], unit["positions"], strict=True) if pair[1] <= end]
            expect(page.locator("#slots .lowest")).to_have_attribute("data-token", str(min(free)[1]))
    units = [set(unit["positions"]) for layer in range(2) for unit in run.reading.lanes[0].slots(layer)["units"]]
    for token in range(run.reading.seen - 40, run.reading.seen):
        holding = sum(token in unit for unit in units)
        assert f"lv{holding * 2}" in page.locator(f'.line [data-token="{token}"]').first.get_attribute("class").split()


def test_a_chat(page, client, monkeypatch):
    monkeypatch.setattr(runs, "REPLY", 10)
    page.goto(client.url)
    page.check('input[value="chat"]')
    page.click("#start")
    expect(page.locator("#status")).to_have_text("Your turn", timeout=20_000)
    page.fill("#say", "hello <b>there</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".line .user").first).to_be_visible()
    expect(page.locator("#status")).to_have_text("Your turn", timeout=20_000)
    expect(page.locator("#say")).to_have_value("")
    all_shown(page)
    assert "hello <b>there</b>" in "".join(page.locator(".line .user").all_inner_texts())


def test_a_reload_catches_up_and_the_run_goes_on(page, client):
    begin(page, client, "x" * 3000, speed="250", wait="")
    expect(page.locator("#clock")).to_have_text(re.compile("^[1-9][0-9]{2}"), timeout=20_000)
    before = tokens_shown(page)
    page.reload()
    expect(page.locator("#stage")).to_be_visible()
    until_shown(page, before)  # the messages of the run so far come one after the other
    assert len(client.server.scheduler.runs) == 1
    page.locator("#speed").select_option("")
    expect(page.locator("#status")).to_have_text("All read", timeout=30_000)


def test_a_closed_tab_ends_its_run_and_the_next_in_the_queue_begins(browser, playground, monkeypatch):
    client, length = playground(Limits(tokens=200_000)), 120_000  # not all read yet when the tab is closed
    monkeypatch.setattr(runs, "GRACE", 0.5)
    first, second = browser.new_context().new_page(), browser.new_context().new_page()
    begin(first, client, "y" * length, wait="")
    expect(first.locator("#status")).to_contain_text("Reading", timeout=20_000)
    begin(second, client, TEXT, wait="")
    expect(second.locator("#model-state")).to_have_text("Waiting: 1 run is before yours", timeout=20_000)
    run = next(iter(client.server.scheduler.runs.values()))
    first.context.close()
    expect(second.locator("#status")).to_have_text("All read", timeout=60_000)
    assert run.state == "stopped"
    assert run.reading.seen < length
    second.context.close()


def test_what_cannot_be_read_is_said_and_nothing_is_lost(page, playground, tmp_path):
    client = playground(Limits(tokens=2000))
    begin(page, client)
    all_shown(page)
    shown = page.inner_text("#clock")
    alert = page.locator("#alert-text")
    page.click("#setup summary")
    cases = [
        ("#source", "", "no text to read"),
        ("#source", "z" * 2500, "reads 2,000 at most"),
        (".policy-text", "tovva:16", "did you mean 'tova:16'"),
        ("#model", "/no/such/model", "/no/such/model"),
    ]
    for selector, value, words in cases:
        field = page.locator(selector).first
        before = field.input_value()
        field.fill(value)
        page.click("#start")
        expect(alert).to_contain_text(words, timeout=20_000)
        assert field.input_value() == value
        field.fill(before)
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\x00\xff\xfe")
    (tmp_path / "empty.txt").write_text(" \n")
    for name, words in (("image.bin", "not a text file"), ("empty.txt", "is empty")):
        page.set_input_files("#file", tmp_path / name)
        expect(alert).to_contain_text(words)
    assert page.input_value("#source") == TEXT
    assert page.inner_text("#clock") == shown
    expect(page.locator("#stage")).to_be_visible()
    (tmp_path / "good.txt").write_text("a text from a file")
    page.set_input_files("#file", tmp_path / "good.txt")
    expect(page.locator("#source")).to_have_value("a text from a file")
    expect(page.locator("#alert")).to_be_hidden()


def test_a_long_paste_does_not_hang(page, client):
    page.goto(client.url)
    expect(page.locator("#source")).not_to_have_value("")
    text = "a line of a long text\n" * 8000
    paste = """(field, text) => {
      const data = new DataTransfer();
      data.setData("text/plain", text);
      field.select();
      field.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, cancelable: true, bubbles: true }));
      return field.value === text;
    }"""
    began = time.monotonic()
    assert page.locator("#source").evaluate(paste, text)
    expect(page.locator("#source-size")).to_contain_text("176,000 characters")
    assert time.monotonic() - began < 10


def test_text_is_never_markup(page, client):
    begin(
        page,
        client,
        "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script> & <b>bold</b>",
    )
    all_shown(page)
    page.hover(".line span:not(.ahead) >> nth=20")
    shown = "".join(page.locator(".line span").all_inner_texts())
    assert "<img src=x" in shown
    assert page.locator(".lines img, .lines b, .lines script, #tip img").count() == 0
    assert "broken" not in page.title()


def test_a_saved_run_opens_alone_and_replays(page, client, tmp_path, browser):
    begin(page, client)
    all_shown(page)
    with page.expect_download() as download:
        page.click("#save-html")
    download.value.save_as(tmp_path / "run.html")
    with page.expect_download() as download:
        page.click("#save-png")
    download.value.save_as(tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    context = browser.new_context(offline=True)
    saved = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    saved.on("request", lambda request: requests.append(request.url))
    saved.on("pageerror", lambda error: errors.append(str(error)))
    saved.goto((tmp_path / "run.html").as_uri())
    assert saved.inner_text("#clock") == page.inner_text("#clock")
    expect(saved.locator("#setup")).to_be_hidden()
    classes = "(spans) => spans.map((span) => span.className)"
    assert saved.locator(".line span").evaluate_all(classes) == page.locator(".line span").evaluate_all(classes)
    saved.locator("#slots").scroll_into_view_if_needed()
    expect(saved.locator("#slots-about")).to_contain_text("bar: score")
    saved.select_option("#speed", "1000")
    saved.click("#play")
    expect(saved.locator("#clock")).to_have_text(page.inner_text("#clock"), timeout=10_000)
    assert violations(saved) == []
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "blob:", "data:"))] == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_and_narrow_screens(page, client, scheme):
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(client.url)
    expect(page.locator("#source")).not_to_have_value("")
    assert violations(page) == []
    begin(page, client, second=scheme == "dark")
    all_shown(page)
    assert violations(page) == []
    for width in (1280, 820, 360):
        page.set_viewport_size({"width": width, "height": 780})
        assert no_sideways_scrolling(page), width
    expect(page.locator(".line span:not(.ahead)").first).to_be_attached()
    assert violations(page) == []
    page.click("#help-open")
    assert violations(page) == []
    page.keyboard.press("Escape")
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    page.click("#theme")
    after = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (before != after) == (scheme == "light")  # two clicks choose dark


def test_a_server_that_goes_away_is_noticed_and_one_that_forgot_the_run_too(page, playground):
    client = playground()
    begin(page, client)
    run = next(iter(client.server.scheduler.runs.values()))
    client.server.scheduler.drop(run)
    expect(page.locator("#alert-text")).to_contain_text("ended on the server", timeout=15_000)
    expect(page.locator("#stage")).to_be_visible()
    page.click("#start")
    expect(page.locator("#status")).to_have_text("All read", timeout=20_000)
    time.sleep(0.1)
