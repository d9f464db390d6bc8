"""Question: does the idea carry over to encoder-decoder models, where the state to bound is what the encoder left?

Method: the decoder writes under teacher forcing what the whole model wrote; after each step the source position with
the lowest cross-attention (mean over layers and heads) is hidden, until `capacity` are left and, of those, the least
attended to are replaced by nothing: the state only shrinks. How likely does the text stay, and how often would the same
token be written? Without --model, a small random model: it shows that the script runs, not an answer.

    python experiments/questions/encoder_decoder.py --model google/flan-t5-small --text article.txt --capacity 64
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msrnn.analysis import question


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, tokens=512, capacity=64, new_tokens=48)
    model, ids = opened(options)
    answer = question.Answer("encoder-decoder", model, {"source": ids.shape[1], "new_tokens": options.new_tokens})
    written = model.generate(ids, max_new_tokens=options.new_tokens, min_new_tokens=2, do_sample=False)
    for policy, capacity in (("full", None), (f"tova:{options.capacity}", options.capacity)):
        nats, same = forced(model, ids, written, capacity)
        answer.perplexity(policy, nats, len(nats), same=round(float(same.float().mean()), 3))
    answer.show(options.output)


def opened(options: Any) -> tuple[Any, Tensor]:
    """The model in eager attention, so that it gives its weights, and the source."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

    if options.model is None:
        torch.manual_seed(0)
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
        config = T5Config(**shape, decoder_start_token_id=0, attn_implementation="eager")
        ids = torch.randint(2, 100, (1, min(options.tokens, 96)), generator=torch.Generator().manual_seed(0))
        return T5ForConditionalGeneration(config).eval(), ids
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model, attn_implementation="eager").eval()
    return model, torch.tensor([question.ids_of(tokenizer, question.text_of(options), options.tokens)])


@torch.no_grad()
def forced(model: Any, ids: Tensor, written: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Nats of each written token but the first, and whether it is still the likeliest, one decoder step at a time."""
    source = model.get_encoder()(input_ids=ids)
    visible, past, nats, same = torch.ones_like(ids), None, [], []
    for step in range(written.shape[1] - 1):
        out = model(encoder_outputs=source, attention_mask=visible, decoder_input_ids=written[:, step : step + 1],
                    past_key_values=past, use_cache=True, output_attentions=True)  # fmt: skip
        past, chances = out.past_key_values, out.logits[0, -1].float().log_softmax(-1)
        nats.append(-chances[written[0, step + 1]])
        same.append(chances.argmax() == written[0, step + 1])
        visible = fewer(visible, torch.stack([one[0, :, 0].mean(0) for one in out.cross_attentions]).mean(0), capacity)
    return torch.stack(nats), torch.stack(same)


def fewer(visible: Tensor, attention: Tensor, capacity: int | None) -> Tensor:
    """Only the `capacity` visible positions with the most attention stay."""
    if capacity is None or int(visible.sum()) <= capacity:
        return visible
    worth = torch.where(visible[0].bool(), attention, -1.0)
    kept = torch.zeros_like(visible)
    kept[0, worth.topk(capacity).indices] = 1
    return kept


if __name__ == "__main__":
    main()
