#!/usr/bin/env bash
# Section 7.3 of the paper: which tokens stay. Sizes and length of the paper; each size also per head, and with a window.
#   bash experiments/retention.sh DATA OUT.jsonl [more options of msrnn retention, e.g. --device cuda --dtype bfloat16]
# DATA has pg19/*.txt. The same command again resumes: traces are stored beside the records.
# SIZES (256 512 1024 2048), TOKENS (4096) and PYTHON (python) may be set; with PROFILE, a name or a file, also
# tova:256 and fade:256 with it.
set -euo pipefail
data=$1 out=$2
shift 2
python=${PYTHON:-python}
export PYTHONPATH="$(dirname "$0")/../src:${PYTHONPATH:-}"
for size in ${SIZES:-256 512 1024 2048}; do
    $python -m msrnn retention "$data/pg19" --policy "tova:$size" --policy "tova-head:$size" --policy "window+4:$size" \
        --tokens "${TOKENS:-4096}" --traces "${out%.jsonl}.traces" -o "$out" "$@"
done
if [ -n "${PROFILE:-}" ]; then
    $python -m msrnn retention "$data/pg19" --policy tova:256 --policy "tova:256,profile=$PROFILE" --policy fade:256 \
        --policy "fade:256,profile=$PROFILE" --tokens "${TOKENS:-4096}" --traces "${out%.jsonl}.traces" -o "$out" "$@"
fi
$python -m msrnn plot "$out" -o "${out%.jsonl}.figures"
