"""Does the playground's page keep up while the model reads a long text on the same machine? Frame times and memory.

python benchmarks/play.py --tokens 32768 [--full]

Starts `msrnn play`, opens the page in a headless Chromium, gives it a text of so many tokens, and counts every frame
until all is read and shown: 16.7 ms is a frame at 60 a second. The script scrolls and points at tokens meanwhile.
Needs the dev extra and a Chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from conditions import conditions, write
from playwright.sync_api import Page, expect, sync_playwright

import msrnn
from msrnn.system.console import note

RESULTS = Path(__file__).parents[1] / "results" / "play.jsonl"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WATCH = """() => {
  window.frames_ = []; window.long_ = 0;
  let last = performance.now();
  const tick = (now) => { window.frames_.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  new PerformanceObserver((list) => { for (const one of list.getEntries()) window.long_ += one.duration; })
    .observe({ type: "longtask" });
}"""


def text_of(tokens: int) -> str:
    """So many tokens of Python's own documentation."""
    from pydoc_data.topics import topics

    _, tokenizer = msrnn.load()
    ids = tokenizer("\n\n".join(topics[name] for name in sorted(topics)), verbose=False).input_ids
    if len(ids) < tokens:
        raise SystemExit(f"there are {len(ids):,} tokens of text here; choose fewer than {tokens:,}")
    return str(tokenizer.decode(ids[:tokens]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, seconds: float = 120) -> None:
    """Until the server's model is loaded."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}api/info") as answer:
                if json.load(answer)["model_ready"]:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server did not come up within {seconds:.0f} s")


def percentiles(frames: list[float]) -> dict[str, float]:
    ordered = sorted(frames)
    pick = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    found = {name: round(ordered[int(share * (len(ordered) - 1))], 1) for name, share in pick.items()}
    return found | {"longest": round(ordered[-1], 1), "over_50_ms": round(sum(f > 50 for f in frames) / len(frames), 4)}


def resident(profile: str) -> int:
    """Bytes of the browser's processes that hold pages: those with our profile, less shared parts."""
    total = 0
    for process in psutil.process_iter(["cmdline"]):
        try:
            line = process.info["cmdline"] or []
            if "--type=renderer" in line and any(profile in part for part in [*line, *_family(process)]):
                total += process.memory_full_info().uss
        except (psutil.Error, OSError):
            continue
    return total


def _family(process: psutil.Process) -> list[str]:
    return [part for parent in process.parents() for part in parent.cmdline()]


def watch(page: Page, text: str, policy: str, full: bool) -> dict[str, Any]:
    """Read the text at full speed; frames, heap and time."""
    put = "(field, text) => { field.value = text; field.dispatchEvent(new Event('input')); }"
    page.locator("#source").evaluate(put, text)
    page.locator('fieldset[data-lane="0"] .policy-text').fill(policy)
    page.set_checked("#full", full)
    page.locator("#speed").evaluate("(element) => { element.value = ''; }")
    page.evaluate(WATCH)
    page.wait_for_timeout(3000)
    idle = page.evaluate("() => window.frames_.splice(0)")
    page.evaluate("() => { window.long_ = 0; }")
    started, step = time.monotonic(), 0
    page.click("#start")
    while page.inner_text("#status") != "All read":
        step += 1
        page.wait_for_timeout(500)
        page.mouse.move(200 + step * 37 % 600, 620 + step * 13 % 200)
        page.mouse.wheel(0, 40 if step % 8 < 4 else -40)
        if page.locator("#alert").is_visible():
            raise SystemExit(page.inner_text("#alert-text"))
    seconds = time.monotonic() - started
    frames = page.evaluate("() => window.frames_.splice(0)")
    return {"frames": frames, "idle": idle, "seconds": seconds, "long_ms": page.evaluate("() => window.long_")}


def heap(page: Page) -> dict[str, int]:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    values = {one["name"]: int(one["value"]) for one in session.send("Performance.getMetrics")["metrics"]}
    return {"js_heap_bytes": values["JSHeapUsedSize"], "dom_nodes": values["Nodes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--policy", default="tova:256")
    parser.add_argument("--full", action="store_true", help="full attention reads along as far as it goes")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    options = parser.parse_args()
    text, port = text_of(options.tokens), free_port()
    common = conditions()
    command = [sys.executable, "-m", "msrnn", "play", "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        wait_for(f"http://127.0.0.1:{port}/")
        with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
            browser = playwright.chromium.launch_persistent_context(
                profile, executable_path=options.chromium, args=FLAGS, viewport={"width": 1360, "height": 900}
            )
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            expect(page.locator("#source")).not_to_have_value("")
            before = resident(profile)
            run = watch(page, text, options.policy, options.full)
            memory = {"page_bytes": resident(profile), "page_bytes_before": before} | heap(page)
            browser.close()
    finally:
        server.terminate()
        server.wait()
    record = {
        "what": "play", "run": f"{options.policy}{' and full' if options.full else ''}", "length": options.tokens,
        "seconds": round(run["seconds"], 1), "tokens_per_s": round(options.tokens / run["seconds"], 1),
        "frames": len(run["frames"]), "frame_ms": percentiles(run["frames"]), "idle_frame_ms": percentiles(run["idle"]),
        "long_tasks_share": round(run["long_ms"] / 1000 / run["seconds"], 4), **memory, **common,
    }  # fmt: skip
    write(RESULTS, [record])
    note(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
