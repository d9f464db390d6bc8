"""Question: which word classes stay in the state, and are they the same at every capacity?

Method: texts are read under TOVA at several capacities and traced; each token gets the Penn tag of its word (NLTK's
perceptron); the mean number of steps that a class is kept is shown beside the paper's.

    python experiments/questions/word_classes.py --text book.txt -o results/word_classes.jsonl
    msrnn plot results/word_classes.jsonl -o figures --figure words
"""

from collections.abc import Sequence

import common

from msrnn.analysis.measure import measure
from msrnn.analysis.table import words_table
from msrnn.eval.record import write_records


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parse_options(__doc__, argv, tokens=4096, capacities="256,512,1024")
    model, tokenizer = common.load_model(options)
    policies = [f"tova:{size}" for size in options.capacities.split(",")]
    records = measure(model, tokenizer, common.read_text(options), policies, length=options.tokens)
    table = words_table(records)
    if table is not None:
        print(table.markdown())
    if options.output:
        write_records(options.output, records)


if __name__ == "__main__":
    main()
