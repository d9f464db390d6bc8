"""Is the core exact on a GPU? The recurrence against the definition, whole models against the CPU, pipelined prefill.

Needs only torch and transformers there (numba may be missing): `PYTHONPATH=src python benchmarks/check_cuda.py`.
Without a GPU the pipelined prefill alone is checked, on a small model.
"""

from __future__ import annotations

import argparse
import sys

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import msrnn
from msrnn.bench import measure, prefill, shapes
from msrnn.core import recurrence, reference
from msrnn.core.attention import Attention
from msrnn.core.slots import Slots
from msrnn.engine.pipeline import CHUNK, PipelinedPrefill
from msrnn.hf.cache import BoundedCache, BoundedLayer
from msrnn.policy import parse_policy
from msrnn.rnn import RNN

POLICIES = ("tova:16", "window+4:16", "h2o:16", "tova-head:16", "tova:16,momentum=0.5", "tova:16,gain=value_norm",
            "h2o:16,gain=value_norm", "key_difference:16", "tova:16,kv=int8", "h2o:16,kv=k8v4", "blend:16",
            "blend:16,kv=int8", "blend:16,kv=k8v4", "tova:16,residual=0.9", "full")  # fmt: skip


def reference_error(text: str) -> float:
    """The largest difference of outputs; infinite if other tokens survive."""
    torch.manual_seed(0)
    policy, attention = parse_policy(text), Attention(0.5)
    query, key, value = (torch.randn(1, n, 60, 8, dtype=torch.float64) for n in (4, 2, 2))
    definition = reference.start(policy, 4, 2)
    expected = reference.run(definition, query[0], key[0], value[0], policy, attention)
    slots = Slots.empty(policy, key.cuda(), value.cuda(), 4)
    parts = [slice(0, 25), slice(25, 26), slice(26, 60)]
    tokens = [[tensor[:, :, part].cuda() for tensor in (query, key, value)] for part in parts]
    output = torch.cat([recurrence.read(slots, *part, policy, attention, chunk=16) for part in tokens], 2)
    for unit, rows in enumerate(definition.rows):
        survivors = sorted(p for p in slots.positions[0, unit].tolist() if p >= 0)
        if survivors != sorted(row.position for row in rows):
            return float("inf")
    return float((output[0].cpu() - expected).abs().nan_to_num(torch.inf).max())


def same_text_as_on_the_cpu(text: str) -> bool:
    """Greedy tokens of a ragged batch in float32."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    model = LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(0, 97, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    mask[0, :20] = mask[2, :7] = 0
    texts = []
    for device in ("cpu", "cuda"):
        model.to(device)
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": 0}
        cache = msrnn.cache(model, text)
        texts.append(model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False).cpu())
    return torch.equal(*texts)


class Sequential(PipelinedPrefill):
    """The same chunks on the same lanes without a graph: none begins before the last is done."""

    one_by_one = True

    def _round(self, size: int, tokens: Tensor, at: int) -> Tensor:
        self.tokens[:, : tokens.shape[1]] = tokens
        self.start.fill_(at)
        logits = self._chunks(size, one_by_one=self.one_by_one and bool(self.streams))
        self._clear_events()
        return logits


class Concurrent(Sequential):
    """Concurrent as they are in a graph, but launched one by one."""

    one_by_one = False


def equals_chunks(device: str, layers: int, lengths: tuple[int, ...], fused: bool) -> bool:
    """Prompts read by several lanes against the plain chunks of `RNN`, at the width of LLaMA-2-7B.

    In float64, where no survivor depends on how sums are rounded. Every length has a pipeline of its own, used twice:
    captured and replayed.
    """
    model, policy, chunk = wide_model(device, layers, torch.float64)
    rnn, good = RNN(model, policy, chunk=chunk, piece=chunk), True
    for length in lengths:
        ids, state = prefill.prompt(model, 1, length), rnn.start()
        for part in torch.split(ids, chunk, 1):
            expected, state = rnn.step(part, state)
        pipeline = PipelinedPrefill(rnn, chunk=chunk, fused_projections=fused)
        for turn in ("captured", "replayed"):
            logits, cache = pipeline.read(ids)
            layer_pairs = zip(cache.bounded, state.cache.bounded, strict=True)
            same = sum(survivors(ours) == survivors(theirs) for ours, theirs in layer_pairs)
            off = float((logits - expected).abs().nan_to_num(torch.inf).max())
            good = good and same == layers and off < 1e-5  # norms are in float32
            result = f"{same} of {layers} layers keep the same tokens, logits off by {off:.1e}"
            print(f"float64, {length} tokens, fused projections {fused}, {turn}: {result}", flush=True)
        del pipeline
        measure.clear(rnn.device)
    return good


def equals_itself(device: str, layers: int, lengths: tuple[int, ...], fused: bool) -> bool:
    """In the model's own bfloat16: concurrent lanes, launched or replayed, leave the bits that sequential ones do."""
    model, policy, chunk = wide_model(device, layers, torch.bfloat16 if device == "cuda" else torch.float32)
    rnn, good = RNN(model, policy, chunk=chunk, piece=chunk), True
    kinds = (Sequential, Concurrent, PipelinedPrefill)
    for length in lengths:
        ids = prefill.prompt(model, 1, length)
        pipelines = {kind.__name__: kind(rnn, chunk=chunk, fused_projections=fused) for kind in kinds}
        expected = tensors(*pipelines["Sequential"].read(ids))
        for name in (*["Concurrent"] * 2, *["PipelinedPrefill"] * 3):
            pairs = zip(tensors(*pipelines[name].read(ids)), expected, strict=True)
            same = [torch.equal(ours, theirs) for ours, theirs in pairs]
            good = good and all(same)
            result = f"{sum(same)} of {len(same)} tensors the same"
            print(f"bits, {length} tokens, fused projections {fused}, {name}: {result}", flush=True)
        del pipelines
        measure.clear(rnn.device)
    return good


def wide_model(device: str, layers: int, dtype: torch.dtype) -> tuple[PreTrainedModel, str, int]:
    """A model at full width, a policy, and the tokens of a chunk; all small without a GPU."""
    shape, policy, chunk = ("llama-2-7b", "tova:512", CHUNK) if device == "cuda" else ("tiny", "tova:16", 16)
    return shapes.make(shape, dtype, device, num_hidden_layers=layers), policy, chunk


def survivors(layer: BoundedLayer) -> list[int]:
    assert layer.slots is not None
    return sorted(layer.slots.positions.flatten().tolist())


def tensors(logits: Tensor, cache: BoundedCache) -> list[Tensor]:
    """All that a prefill leaves."""
    slots = [layer.slots for layer in cache.bounded if layer.slots is not None]
    return [logits, *(tensor for one in slots for tensor in one.tensors().values())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--no-pipeline", action="store_true", help="policies only")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device, good = "cuda" if torch.cuda.is_available() else "cpu", True
    print(
        f"{measure.machine(torch.device(device))}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for text in options.policies if device == "cuda" else ():
        error, same = reference_error(text), same_text_as_on_the_cpu(text)
        good = good and error < 1e-9 and same
        print(f"{text:24} off from the definition by {error:.1e}   greedy text as on the CPU: {same}", flush=True)
    layers, bits, chunks = (12, (4096, 30000, 4096, 9999), (4096, 9999)) if device == "cuda" else (2, (999,), (700,))
    for fused in () if options.no_pipeline else (False, True):
        good &= equals_itself(device, layers, bits, fused)
        good &= equals_chunks(device, layers, chunks, fused)
    sys.exit(0 if good else "something differs: see above")


if __name__ == "__main__":
    main()
