#!/usr/bin/env bash
# Answers of a real model from reused documents, prefilled behind the prefix and alone, beside the rivals, on the second half of each set:
#   benchmarks/gpu_real_models.sh MODEL SETS_DIR OUT SECONDS
# Both runs share the GPU and go on where they stopped. RAGSERVE_EMBEDDER names the embedder of `passages`, RAGSERVE_ATTENTION the attention
# backend (flashinfer where FA3's library is not there).
set -uo pipefail
model=$1 sets=$2 out=$(mkdir -p "$3" && cd "$3" && pwd) seconds=$4
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
question=concat:recompute=question,share
reused="concat,$question=0.05,$question=0.15"
ask() { # prefix, strategies, engines
  RAGSERVE_KV_PREFIX=$1 python3 -m benchmarks.gpu_eval "$out/$1" "$sets" --model "$model" --benchmark short-answers --half second \
    --only "${ONLY:-squad10,qed10,musique,2wikimqa}" --engines ${3:-3} --seconds "$seconds" --strategies "$2" >"$out/$1.log" 2>&1
}
ask none "$reused" 2 &
ask fixed "full,$reused,passages:keep=0.25" 4 &
wait
tail -n 3 "$out"/none.log "$out"/fixed.log
