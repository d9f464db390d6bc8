"""Question: which word classes stay, and does a model keep the same ones at every size?

Method: texts are read under TOVA at several capacities and traced; each token takes the Penn tag of its word (NLTK's
perceptron); the mean number of steps a class is kept stands beside the paper's.

    python experiments/questions/word_classes.py --text book.txt -o results/word_classes.jsonl
    msrnn plot results/word_classes.jsonl -o figures --figure words
"""

from collections.abc import Sequence

from msrnn.analysis import question
from msrnn.analysis.measure import measure
from msrnn.analysis.table import words_table
from msrnn.eval.record import write_records


def main(argv: Sequence[str] | None = None) -> None:
    options = question.arguments(__doc__, argv, tokens=4096, capacities="256,512,1024")
    model, tokenizer = question.opened(options)
    policies = [f"tova:{size}" for size in options.capacities.split(",")]
    records = measure(model, tokenizer, question.text_of(options), policies, length=options.tokens)
    table = words_table(records)
    if table is not None:
        print(table.markdown())
    if options.output:
        write_records(options.output, records)


if __name__ == "__main__":
    main()
