"""Question: does the idea carry over to encoder-decoder models, where the encoder's output is the state to bound?

Method: the decoder is teacher-forced on what the full model generated; after each step only the `capacity` source
positions with the most cross-attention (mean over layers and heads) stay visible, so the state only shrinks. How likely
does the text stay, and how often is the same token still the likeliest? Without --model, a small random model: it shows
that the script runs, not an answer.

    python experiments/questions/encoder_decoder.py --model google/flan-t5-small --text article.txt --capacity 64
"""

from collections.abc import Sequence
from typing import Any

import common
import torch
from torch import Tensor


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, tokens=512, capacity=64, new_tokens=48)
    model, ids = load_seq2seq(options)
    results = common.Results("encoder-decoder", model, {"source": ids.shape[1], "new_tokens": options.new_tokens})
    target = model.generate(ids, max_new_tokens=options.new_tokens, min_new_tokens=2, do_sample=False)
    for policy, capacity in (("full", None), (f"tova:{options.capacity}", options.capacity)):
        nats, same = teacher_forced(model, ids, target, capacity)
        results.perplexity(policy, nats, len(nats), same=round(float(same.float().mean()), 3))
    results.show(options.output)


def load_seq2seq(options: Any) -> tuple[Any, Tensor]:
    """The model in eager attention, which returns attention weights, and the ids of the source."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

    if options.model is None:
        torch.manual_seed(0)
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
        config = T5Config(**shape, decoder_start_token_id=0, attn_implementation="eager")
        ids = torch.randint(2, 100, (1, min(options.tokens, 96)), generator=torch.Generator().manual_seed(0))
        return T5ForConditionalGeneration(config).eval(), ids
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model, attn_implementation="eager").eval()
    return model, torch.tensor([common.encode(tokenizer, common.read_text(options), options.tokens)])


@torch.no_grad()
def teacher_forced(model: Any, ids: Tensor, target: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Nats of each target token but the first, and whether it is still the likeliest, one decoder step at a time."""
    source = model.get_encoder()(input_ids=ids)
    visible, past, nats, same = torch.ones_like(ids), None, [], []
    for step in range(target.shape[1] - 1):
        out = model(encoder_outputs=source, attention_mask=visible, decoder_input_ids=target[:, step : step + 1],
                    past_key_values=past, use_cache=True, output_attentions=True)  # fmt: skip
        past, log_probs = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
        nats.append(-log_probs[target[0, step + 1]])
        same.append(log_probs.argmax() == target[0, step + 1])
        attention = torch.stack([layer[0, :, 0].mean(0) for layer in out.cross_attentions]).mean(0)
        visible = evict(visible, attention, capacity)
    return torch.stack(nats), torch.stack(same)


def evict(visible: Tensor, attention: Tensor, capacity: int | None) -> Tensor:
    """Only the `capacity` visible positions with the most attention stay."""
    if capacity is None or int(visible.sum()) <= capacity:
        return visible
    scores = torch.where(visible[0].bool(), attention, -1.0)
    survivors = torch.zeros_like(visible)
    survivors[0, scores.topk(capacity).indices] = 1
    return survivors


if __name__ == "__main__":
    main()
