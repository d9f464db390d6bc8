"""kvpress on the same tokens: TOVAPress for the prompt, DecodingPress(interval 1) for the continuation.

Run by the python of .venv-kvpress (benchmarks/kvpress-requirements.txt); knows nothing of msrnn. Prints one
JSON object. What kvpress does, read in its source (0.5.5) and checked against a plain model's attention:

- the prompt is one-shot: full attention over all N tokens, and after each layer's attention the k rows stay
  that the *last* query attends to most, by the mean over all query heads, the same rows in every KV head. No
  prompt token ever sees a bounded state, so this is not the paper's recurrence;
- the newest row is forced to stay, in the prompt and at every step; the paper's TOVA may drop it;
- with interval 1 a step attends to k + 1 rows and drops one, by a `topk` and a `gather` of the whole layer;
- rows lie in order of score, not of position; keys keep their rotary position, so true positions are passed;
- a fused attention (sdpa) gives no weights, so the last query's are computed again; eager attention has them,
  but holds N x N of them in the prompt. So the prompt runs under sdpa, and decoding is measured under both.
"""

import argparse
import ctypes
import gc
import json
import math
import resource
import sys
import threading
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import torch
from kvpress import DecodingPress, PrefillDecodingPress, TOVAPress
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

RUNS = {  # name: (compress with kvpress?, attention while decoding)
    "kvpress": (True, "sdpa"),
    "kvpress_eager_decode": (True, "eager"),
    "plain": (False, "sdpa"),
}


def tova_press(prompt: int, capacity: int) -> PrefillDecodingPress:
    """`capacity` rows in both phases: kvpress keeps int(N * (1 - ratio)), half a row guards its rounding."""
    ratio = max(0.0, 1 - (capacity + 0.5) / prompt)
    step = DecodingPress(
        base_press=TOVAPress(),
        compression_interval=1,
        target_size=capacity,
        hidden_states_buffer_size=0,  # TOVA needs the current hidden state only
    )
    return PrefillDecodingPress(prefilling_press=TOVAPress(compression_ratio=ratio), decoding_press=step)


def prefill(model, ids: torch.Tensor) -> tuple[DynamicCache, torch.Tensor, float]:
    """The cache, the logits after the last id, and the seconds it took."""
    cache = DynamicCache()
    start = time.perf_counter()
    logits = model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1).logits
    return cache, logits, time.perf_counter() - start


def decode(model, cache, logits: torch.Tensor, ids: torch.Tensor, position: int) -> tuple[float, float]:
    """Scores each id by the logits before it, then feeds it: mean loss, the model's seconds per token."""
    loss = seconds = 0.0
    for offset, token in enumerate(ids):
        loss += torch.nn.functional.cross_entropy(logits[0], token[None]).item()
        start = time.perf_counter()
        where = torch.tensor([[position + offset]])
        logits = model(input_ids=token.view(1, 1), past_key_values=cache, position_ids=where).logits[:, -1]
        seconds += time.perf_counter() - start
    return loss / len(ids), seconds / len(ids)


def rows(cache: DynamicCache) -> list[int]:
    """Rows held, layer by layer."""
    return [layer.keys.shape[2] for layer in cache.layers]


def resident() -> int:
    """Bytes resident once the free heap has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return read_statm()


def read_statm() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Peak:
    """Largest resident bytes inside the block: by a sampling thread, and by the kernel's own mark."""

    def __enter__(self):
        self.sampled = resident()
        self.kernel = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.resettable = reset_kernel_peak()
        self.thread.start()
        return self

    def watch(self):
        while not self.stop.wait(0.003):
            self.sampled = max(self.sampled, read_statm())

    def __exit__(self, *_):
        self.kernel = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if self.resettable else None
        self.stop.set()
        self.thread.join()

    def growth(self, baseline: int) -> dict:
        return {
            "sampled_bytes": self.sampled - baseline,
            "kernel_bytes": None if self.kernel is None else self.kernel - baseline,
        }


def reset_kernel_peak() -> bool:
    """Linux: sets the peak resident size (and so ru_maxrss) back to the present one."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def once(model, ids: torch.Tensor, args, name: str, watch=nullcontext) -> dict:
    """The prompt and its continuation under the run called `name`; `watch` surrounds either phase."""
    compressed, attention = RUNS[name]
    prompt, continuation = ids[: args.prompt], ids[args.prompt : args.prompt + args.continuation]
    with tova_press(args.prompt, args.capacity)(model) if compressed else nullcontext():
        with watch() as in_prefill:
            cache, logits, prefill_seconds = prefill(model, prompt)
        rows_after_prompt = rows(cache)
        model.set_attn_implementation(attention)
        with watch() as in_decode:
            loss, seconds = decode(model, cache, logits[:, -1], continuation, args.prompt)
        model.set_attn_implementation("sdpa")
    return {
        "prefill_seconds": prefill_seconds,
        "decode_seconds_per_token": seconds,
        "decode_attention": attention,
        "perplexity": math.exp(loss),
        "rows_after_prompt": rows_after_prompt,
        "rows_at_end": rows(cache),
        "peaks": (in_prefill, in_decode),
    }


def measure(model, ids: torch.Tensor, args) -> dict:
    """Memory first, each phase from a trimmed heap (warms up too); then the runs take turns being timed."""
    once(model, ids[:64], argparse.Namespace(prompt=48, continuation=16, capacity=32), "kvpress_eager_decode")
    baseline = resident()
    report = {}
    for name in RUNS:
        result = once(model, ids, args, name, watch=Peak)
        in_prefill, in_decode = result.pop("peaks")
        peak = {"prefill": in_prefill.growth(baseline), "decode": in_decode.growth(baseline)}
        report[name] = result | {"prefill_seconds": [], "decode_seconds_per_token": [], "peak_growth": peak}
    for _ in range(args.repeat):
        for name in RUNS:
            result = once(model, ids, args, name)
            for key in ("prefill_seconds", "decode_seconds_per_token"):
                report[name][key].append(result[key])
    return {"baseline_rss_bytes": baseline} | report


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time, memory and perplexity of kvpress's TOVA, as JSON.")
    parser.add_argument("--model", required=True, help="a Hugging Face model folder")
    parser.add_argument("--tokens", required=True, help="a JSON list of token ids")
    parser.add_argument("--prompt", type=int, required=True, help="how many ids are the prompt")
    parser.add_argument("--continuation", type=int, required=True, help="how many ids after it are decoded")
    parser.add_argument("--capacity", type=int, required=True, help="rows each layer keeps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ids = torch.tensor(json.loads(Path(args.tokens).read_text()))
    if len(ids) < args.prompt + args.continuation:
        sys.exit(f"{args.tokens} has {len(ids)} ids, fewer than {args.prompt} + {args.continuation}")
    torch.set_num_threads(args.threads)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa")
    versions = {package: version(package) for package in ("kvpress", "transformers", "torch")}
    with torch.inference_mode():
        report = measure(model, ids, args)
    print(json.dumps({"versions": versions, "arguments": vars(args)} | report))


if __name__ == "__main__":
    main()
