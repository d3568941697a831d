#!/usr/bin/env bash
# Further measurements of sparse decoding on an H200, in two parts:
#   benchmarks/gpu_decode_more.sh OUT answers SET.jsonl.gz ... [--rows N]
#       tests that need a GPU, streaming heads, KV of 8 and 4 bits (2.5 minutes with four sets of 60 rows)
#   benchmarks/gpu_decode_more.sh OUT speed BACKEND ...
#       decode steps at three points: ragserve (with the check), ragserve-8-bit (three minutes), ragserve-page-16
# OUT gets JSON and a log for each run; a part continues if one of its runs fails. RAGSERVE_ATTENTION as for
# gpu_decode_quality.py.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd) part=$2
shift 2
rest=()
for each in "$@"; do [[ -f $each ]] && each=$(realpath "$each"); rest+=("$each"); done
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
failed=0

# run NAME COMMAND...: run a command with its output in OUT/NAME.txt
run() {
  local name=$1
  shift
  timeout 560 "$@" >"$out/$name.txt" 2>&1 || { echo "$name failed: $(tail -n 1 "$out/$name.txt")" && return 1; }
  echo "$name: done"
}

case $part in
answers)
  run tests python3 -m pytest -q -W default -m gpu tests/unit/attention || failed=1
  pids=()
  for pages in "64 of 16" "64 of 16 in 8 bits" "64 of 16 in 4 bits"; do # all on one GPU: the model is small
    run "quality-${pages// /-}" python3 -m benchmarks.gpu_decode_quality "$out/quality-${pages// /-}" "${rest[@]}" --pages "$pages" &
    pids+=($!)
  done
  run heads python3 - "$out/heads.json" <<'PY' || failed=1
import sys
from pathlib import Path

from ragserve.config import DEFAULT_MODEL
from ragserve.verification.calibration.streaming_heads import calibrate_heads

options = {"model": DEFAULT_MODEL, "share": 0.5, "steps": 300, "tokens": 2048, "penalty": 0.05, "held_out": 16, "device": "cuda"}
for row in calibrate_heads(Path(sys.argv[1]), **options, progress=lambda *step: print(*step) if step[0] % 20 == 0 else None):
    print(row)
PY
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  ;;
speed)
  run decode python3 -m benchmarks.gpu_decode "$out" "${rest[@]}" --short || failed=1
  ;;
*)
  echo "no part $part: answers or speed" >&2
  exit 2
  ;;
esac
exit "$failed"
