#!/usr/bin/env bash
# Run compute-sanitizer over the kernels of offloaded requests on a CUDA machine.
#
#     benchmarks/gpu_sanitize.sh OUT [SECONDS]
#
# memcheck over all of them, then racecheck and synccheck over those that use shared memory. OUT gets kernels_offloaded_memcheck.txt, which says
# what ran, on what, and what was found. SECONDS: of all tools, default 480, half of them racecheck's; a tool that takes longer than its part is
# ended, and the file says so. Kernels are compiled before, without a tool. Without PyTorch's caching allocator, every tensor is an allocation of its own.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)/kernels_offloaded_memcheck.txt
limit=${2:-480}
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/index${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
shared=(resident_blocks_and_sparse_decode progressive_decode_over_places filling prefix_rows_attention page_select)
failed=0

"$python" -m tests.kernels.memcheck_offloaded || { echo "it fails without the tool"; exit 1; }
{
  echo "compute-sanitizer, $("$sanitizer" --version | grep -i version)"
  "$python" - <<'PY'
import time

import torch
import triton

print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, Triton {triton.__version__}, {time.strftime('%Y-%m-%d')}")
PY
} | tee "$out"

run() { # TOOL SECONDS KERNEL...
  local tool=$1 limit=$2 began=$SECONDS code
  shift 2
  printf '\ncompute-sanitizer --tool %s python -m tests.kernels.memcheck_offloaded %s\n' "$tool" "$*" | tee -a "$out"
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 \
    "$python" -m tests.kernels.memcheck_offloaded "$@" 2>&1 | tail -n 60 | tee -a "$out"
  code=${PIPESTATUS[0]}
  [ "$code" = 0 ] || { failed=1; echo "exit $code (124: it did not end within $limit s)" | tee -a "$out"; }
  echo "$((SECONDS - began)) s" | tee -a "$out"
}

run memcheck $((limit * 3 / 8))
run synccheck $((limit / 8)) "${shared[@]}"
run racecheck $((limit / 2)) "${shared[@]}"
exit "$failed"
