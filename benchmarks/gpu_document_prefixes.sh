#!/usr/bin/env bash
# Choose the documents' prefix on one half of each set with one model, then confirm the best two elsewhere.
#   gpu_document_prefixes.sh screen MODEL SETS_DIR OUT SECONDS
#   gpu_document_prefixes.sh confirm MODEL HALF SETS_DIR OUT SECONDS SCREEN.json ...
# Several processes share one GPU, because each waits for the launches of small kernels most of the time.
set -euo pipefail
step=$1 model=$2
shift 2
processes=${PROCESSES:-7}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
emulate() { # half, sets, out, seconds, further options
  local half=$1 sets=$2 out=$3 seconds=$4
  shift 4
  for ((k = 0; k < processes; k++)); do
    python -m benchmarks.document_prefixes run "$model" "$out-$k.json" "$sets"/*.jsonl.gz --half "$half" \
      --shard "$k/$processes" --seconds "$seconds" "$@" >"$out-$k.log" 2>&1 &
  done
  wait
  tail -qn 1 "$out"-*.log
}
case $step in
  screen) emulate first "$1" "$2" "$3" ;;
  confirm)
    half=$1 sets=$2 out=$3 seconds=$4
    shift 4
    best=$(python - "$@" <<'PY'
import collections, sys
from pathlib import Path
from benchmarks.document_prefixes import table
score = collections.defaultdict(float)
for row in table([Path(path) for path in sys.argv[1:]]):
    if row["recomputed"] in (0, 0.05, 0.15) and row["prefix"] not in ("full", "check", "alone"):
        score[row["prefix"]] += row["difference"]
print(",".join(["alone", *sorted(score, key=score.get, reverse=True)[:2]]))
PY
    )
    echo "confirming $best"
    emulate "$half" "$sets" "$out" "$seconds" --prefixes "$best" --shares 0,0.02,0.05,0.1,0.15
    ;;
esac
