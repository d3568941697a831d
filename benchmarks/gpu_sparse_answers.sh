#!/usr/bin/env bash
# Sparse decoding, sparse prefill, KV of few bits and dialogues, judged by a real model, on one GPU, in parts:
#   benchmarks/gpu_sparse_answers.sh PART MODEL SETS_DIR LONG_SETS_DIR OUT SECONDS
# SETS_DIR has longeval, kv_retrieval, qmsum, mtrag_un; LONG_SETS_DIR the sets of `benchmarks.long_contexts` (NAME_60, NAME_250). OUT is
# the same for all parts of a model: the same command goes on where it stopped. All engines of a part run at once, about 11 GB of the GPU and
# a minute's start each. Estimates, not measured, for an H200 and the 1.5B, 100 questions a set:
#   heads      4 min  gates of the streaming heads, OUT/heads.json; the 0.5B 2 min. Before `streaming`
#   decode     9 min  budgets, rivals, lag, thresholds, pages of 16 and flat ones, dense layers, at 8k; `decode-30k` 10 min, twice for 100 questions
#   streaming  8 min  25, 50, 75 % of the heads, wrong ones, a window alone
#   prefill    9 min  blocks, lines and lines by the prompt's end at 8k; `prefill-30k` 10 min, twice
#   bits       6 min  KV of 8 and 4 bits, dense and under budgets; offloaded beside resident
#   long       9 min  answers of 300 tokens
#   dialogues  9 min  5 and 10 turns: composed, computed anew every turn, every third, never; beside `prefix` and page rivals
#   table      1 min  OUT/sparse.json and OUT/ragserve-sparse.json; no GPU
# RAGSERVE_ATTENTION names the attention backend where FA3's library is not there.
set -uo pipefail
part=$1 model=$2 sets=$3 long=$4 out=$(mkdir -p "$5" && cd "$5" && pwd) seconds=$6
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
data=$(mktemp -d)
trap 'rm -r "$data"' EXIT
ln -s "$(realpath "$sets")"/* "$(realpath "$long")"/*.jsonl* "$data"
short=lines@8000,kv@8000,squad10_60,musique_60
deep=lines@30000,kv@30000,squad10_250,musique_250
plain="pages of 64"
ask() { # sets, patterns, engines at once, further options
  local names=$1 only=$2 engines=$3
  shift 3
  python3 -m benchmarks.sparse_answers "$out" --model "$model" --data "$data" --sets "$names" --only "$only" --engines "$engines" \
    --limit 100 --half second --seconds "$seconds" --pool 200000 --in-flight 8 "$@"
}
decode="$plain/dense;$plain/budget*;$plain/threshold*;$plain/concat*;pages of 16*/*;pages of 64, flat/*;2 first*/*"
prefill="$plain/dense;$plain/blocks*;$plain/lines*;lines by the prompt's end/*"
case $part in
  heads) python3 -m ragserve.cli calibrate --part heads --model "$model" --out "$out/heads.json" --steps 150 --tokens 4096 ;;
  decode) ask "$short" "$decode" 7 --shards "$plain=2" ;;
  decode-30k) ask "$deep" "$decode" 7 --shards "$plain=2" --in-flight 4 ;;
  streaming) ask "$short" "$plain/dense;* % streaming heads/*;50 % wrong heads/*;window alone/*" 6 --heads "$out/heads.json" ;;
  prefill) ask "$short" "$prefill" 4 --shards "$plain=3" ;;
  prefill-30k) ask "$deep" "$prefill" 4 --shards "$plain=3" --in-flight 2 ;;
  bits) ask "$short" "$plain/dense;KV of */*;offloaded/*" 4 ;;
  long) ask qmsum@12000,mtrag_un@8000 "$plain/dense;$plain/budget*;pages of 16*/*;KV of */*" 6 --shards "$plain=2" ;;
  dialogues)
    RAGSERVE_SYSTEM_PROMPT="Answer the question from the documents. Write the answer alone, in as few words as possible." \
      python3 -m benchmarks.gpu_multiturn "$out/dialogues" "$sets" --model "$model" --seconds "$seconds" --refresh-turns 1,3 \
      --units squad10:10:end+,2wikimqa:10:end+,squad10:5:end+,2wikimqa:5:end+,mtrag_un:5:end+,qmsum:5:end+ --decode-budget 1024 \
      --strategies "full,prefix,concat,concat:recompute=question,share=0.15,concat:recompute=sentences,share=0.15"
    ;;
  table) python3 -m benchmarks.sparse_table "$out/sparse.json" "$out" --record "$out/ragserve-sparse.json" ;;
  *) echo "no part $part" && exit 2 ;;
esac
