#!/usr/bin/env bash
# Measure on a CUDA machine the kernels' parts whose committed figures are out of date, and run the tests that only a GPU can run.
#
#     benchmarks/gpu_kernels.sh OUT SET.jsonl.gz [SET.jsonl.gz ...]
#
# About 6 minutes on an H200. OUT gets kernels_{decode,compose}.json: the committed rows with the parts measured now put in their place, each
# part written as soon as it is done. The question sets should have long documents. FlashInfer is measured where it can be imported.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
model=examples/models/ragserve-tiny
failed=0
export out model

# bench MODULE PART [quick]: without the command line, which needs packages that a bare GPU machine may lack
bench() {
  python3 - "$out" "$model" "$@" <<'PY'
import sys
from importlib import import_module
from pathlib import Path

out, model, name, part, quick, *sets = sys.argv[1:]
options = {"model": model, "data": [Path(each) for each in sets]} if name == "kernels_decode" else {}
import_module(f"ragserve.bench.{name.replace('_', '.')}").run(None if quick == "quick" else Path(out), quick=quick == "quick", parts=[part], **options)
PY
}
export -f bench

cp benchmarks/results/kernels_{decode,compose}.json "$out/"
echo "== tests, and every part once in small, which compiles what it needs"
started=$SECONDS
pids=()
timeout 200 python3 -m pytest -q -W default tests/kernels/test_progressive_decode.py tests/unit/documents/test_cuda.py \
  -k "any_shape or captured_graph or achieved_weight or document_cuda" >"$out/gpu_tests.txt" 2>&1 &
pids+=($!)
parts=("kernels_decode:dense decode" "kernels_decode:progressive decode, real keys" "kernels_compose:rotate_gather" "kernels_decode:progressive decode" "kernels_compose:rotate_gather beside decode" "kernels_decode:page statistics")
for i in "${!parts[@]}"; do
  timeout 200 bash -c 'bench "$@"' _ "${parts[i]%%:*}" "${parts[i]#*:}" quick "$@" >"$out/warm_$i.txt" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || { failed=1; echo "failed: process $pid"; }; done
tail -n 5 "$out/gpu_tests.txt"
tail -qn 3 "$out"/warm_*.txt
echo "== measured, $((SECONDS - started)) s so far"
for each in "${parts[@]}"; do
  timeout 150 bash -c 'bench "$@"' _ "${each%%:*}" "${each#*:}" all "$@" || { failed=1; echo "failed: $each"; }
  echo "== $((SECONDS - started)) s so far"
done
exit "$failed"
