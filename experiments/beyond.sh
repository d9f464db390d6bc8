#!/usr/bin/env bash
# The experiments beyond the paper (a better preset, capacities by layer), from search to tables, on one GPU:
#   bash experiments/beyond.sh DATA WORK [MODEL]
# Every step resumes where it was stopped when the same command is given again. ROUNDS (1), CHUNKS (4 a book),
# DTYPE (bfloat16), BATCH (32), PYTHON (python) may be set. WORK gets search.jsonl, chosen.txt, tova.json, preset.json,
# budgets.jsonl, tables.txt, and the measurements.
set -euo pipefail
data=$1 work=$2 model=${3:-}
python=${PYTHON:-python} chunks=${CHUNKS:-4} dtype=${DTYPE:-bfloat16} batch=${BATCH:-32} rounds=${ROUNDS:-1}
here=$(dirname "$0")
export PYTHONPATH="$here/../src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
mkdir -p "$work"
common="--data $data --dtype $dtype --batch $batch --chunks $chunks ${model:+--model $model}"
half=$($python "$here/books.py" "$data")
books=$(echo "$half" | grep -o -- --text | wc -l)

$python "$here/search.py" $common --out "$work/search.jsonl" | tee "$work/search.txt"
kind=$(cat "$work/chosen.txt")
for one in tova preset; do
    policy=$([ $one = tova ] && echo tova || echo "$kind")
    $python -m msrnn calibrate $model $half --policy "$policy" --chunks $((books * chunks)) --batch "$batch" \
        --dtype "$dtype" --average 256 --average 512 --average 128 --rounds "$rounds" -o "$work/$one.json" |
        tee "$work/$one.txt"
done
$python "$here/budgets.py" $common --profile "tova=$work/tova.json" --profile "$kind=$work/preset.json" \
    --out "$work/budgets.jsonl" | tee "$work/budgets.txt"
cat "$work/search.txt" "$work/tova.txt" "$work/preset.txt" "$work/budgets.txt" > "$work/tables.txt"
