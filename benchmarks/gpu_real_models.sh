#!/usr/bin/env bash
# Answers of real models from reused documents, beside the rivals, on the second half of each set, all on one GPU:
#   benchmarks/gpu_real_models.sh MODEL SMALL_MODEL SETS_DIR LONG_SETS_DIR OUT SECONDS
# MODEL reads the sets behind the documents' prefix, and without one; SMALL_MODEL reads them behind it; and MODEL reads the sets of
# `benchmarks.long_contexts` (NAME_60, NAME_250). The same command goes on where it stopped. RAGSERVE_EMBEDDER names the embedder of `passages`,
# RAGSERVE_ATTENTION the attention backend (triton or flashinfer where FA3's library is not there).
set -uo pipefail
model=$1 small=$2 sets=$3 long=$4 out=$(mkdir -p "$5" && cd "$5" && pwd) seconds=$6
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
question=concat:recompute=question,share
reused="concat,$question=0.05,$question=0.15"
best=concat:passages.keep # of the best passages
chosen="passages:keep=0.25,$best=0.25,$best=0.25,recompute=question,share=0.2"
rivals="passages:keep=0.15,cacheblend:share=0.15,epic:first=16,concat:recompute=anchors,share=0.15,random:share=0.15,concat:recompute=sentences,share=0.15"
rivals+=",$best=0.4,recompute=question,share=0.2,passages:keep=0.4"
names=squad10,qed10,musique,2wikimqa
ask() { # name, model, prefix, sets' folder, sets, strategies, further options
  local name=$1 model=$2 prefix=$3 folder=$4 only=$5 strategies=$6
  shift 6
  RAGSERVE_KV_PREFIX=$prefix python3 -m benchmarks.gpu_eval "$out/$name" "$folder" --model "$model" --benchmark short-answers --half second \
    --only "$only" --seconds "$seconds" --strategies "$strategies" "$@" >"$out/$name.log" 2>&1 &
}
ask fixed "$model" fixed "$sets" "$names" "full,$chosen,$reused,$rivals" --engines 4 --first 7
ask none "$model" none "$sets" "$names" "$reused,$best=0.25,recompute=question,share=0.2" --engines 1 --first 3
ask small "$small" fixed "$sets" "$names" "full,$chosen,$reused" --engines 1
ask long-60 "$model" fixed "$long" "${names//,/_60,}_60" "full,$chosen,$reused,passages:keep=0.15" --engines 1 --first 4 --in-flight 6
ask long-250 "$model" fixed "$long" "${names//,/_250,}_250" "full,$chosen,$question=0.05" --engines 1 --first 4 --in-flight 3
wait
tail -n 2 "$out"/*.log
