#!/usr/bin/env bash
# Sparse decoding, sparse prefill, KV of few bits and dialogues, judged by a real model, on one GPU, in parts:
#   benchmarks/gpu_sparse_answers.sh PART MODEL SETS_DIR LONG_SETS_DIR OUT SECONDS
# SETS_DIR has longeval, kv_retrieval, qmsum, mtrag_un; LONG_SETS_DIR the sets of `benchmarks.long_contexts` (NAME_60, NAME_250). OUT is
# the same for all parts of a model: the same command goes on where it stopped. At most five engines run at once, of about 10 GB each with
# the 1.5B; they start in a minute or two. Every question is asked under all settings of an engine before the next one, and sets take turns:
# stopped at any time, a part has the same questions under all settings.
#   first      budgets, rivals, thresholds (two engines), KV of 8 and 4 bits, blocks and lines in prefill, at 8k
#   deep       budgets and rivals, exact scores, KV of 8 bits, blocks and lines, at 30k
#   scores     budgets by exact scores and by smaller logical pages, KV of 4 bits, at 8k, on the questions of `first`
#   pages      pages of 16, Quest, flat pages, dense layers, at 8k, on the questions of `first`
#   more       MInference's lines, shares; offloaded beside resident; decoding over composed contexts
#   heads      gates of the streaming heads, OUT/heads.json, before `streaming`: 25, 50, 75 % of the heads, wrong ones, a window alone
#   long       answers of 300 tokens
#   dialogues  5 and 10 turns: composed, computed anew every turn, every third, never; beside `prefix` and page rivals
#   table      OUT/sparse.json and OUT/ragserve-sparse.json; no GPU
# RAGSERVE_ATTENTION names the attention backend where FA3's library is not there, LIMIT the questions of a set (200).
set -uo pipefail
part=$1 model=$2 sets=$3 long=$4 out=$(mkdir -p "$5" && cd "$5" && pwd) seconds=$6
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
data=$(mktemp -d)
trap 'rm -r "$data"' EXIT
for each in "$(realpath "$sets")"/*/ "$(realpath "$long")"/*.jsonl*; do ln -sfn "${each%/}" "$data"; done
short=lines@8000,kv@8000,squad10_60,2wikimqa_60
deep=lines@30000,kv@30000,squad10_250,2wikimqa_250
plain="pages of 64"
ask() { # sets, patterns, engines at once, prompts of an engine at once, further options
  local names=$1 only=$2 engines=$3 prompts=$4
  shift 4
  python3 -m benchmarks.sparse_answers "$out" --model "$model" --data "$data" --sets "$names" --only "$only" --engines "$engines" \
    --limit "${LIMIT:-200}" --seconds "$seconds" --pool 160000 --in-flight 16 --prompts "$prompts" "$@"
}
budgets="$plain/dense;$plain/budget*[0-9]"
few=1024,2048,4096
at() { printf '%s;' "${@/#/$plain/budget }"; }
case $part in
  first)
    ask "$short" "$budgets;$(at "1,024, [cs]*" "2,048, *" "4,096, [cs]*")$plain/threshold 0.9[58]" 2 8 --shards "$plain=2" &
    ask "$short" "KV of */budget 2,048" 2 8 &
    ask "$short" "$plain/blocks, alpha 0.955;$plain/lines, alpha 0.9;$plain/lines, alpha 0.955" 1 8 &
    wait
    ;;
  deep)
    ask "$deep" "$budgets;$(at "*exact scores" "4,096, [cs]*")" 3 4 --shards "$plain=3" &
    ask "$deep" "KV of 8 bits/dense" 1 4 &
    ask "$deep" "$plain/blocks, alpha 0.955;$plain/lines, alpha 0.955" 1 4 &
    wait
    ;;
  scores)
    ask "$short" "$(at "*exact scores")" 2 8 --shards "$plain=2" &
    ask "$short" "logical pages of 4/*;KV of 4 bits/dense" 2 8 --budgets $few &
    wait
    ;;
  pages) ask "$short" "pages of 16/*;pages of 64, flat/*;2 first*/*;pages of 16, 2*/*" 5 8 --budgets $few ;;
  more)
    ask "$short" "lines by the prompt's end/*;$plain/lines, a share*" 2 8 &
    ask "$short" "offloaded/*;$plain/concat*" 2 4 --budgets $few &
    wait
    ;;
  heads) python3 -m ragserve.cli calibrate --part heads --model "$model" --out "$out/heads.json" --steps 150 --tokens 1536 ;;
  streaming) ask "$short" "* % streaming heads/*;50 % wrong heads/*;window alone/*" 5 8 --heads "$out/heads.json" --budgets $few ;;
  long) ask qmsum@12000,mtrag_un@8000 "$budgets;pages of 16/*;KV of */budget 2,048" 5 6 --shards "$plain=2" --budgets $few ;;
  dialogues)
    RAGSERVE_SYSTEM_PROMPT="Answer the question from the documents. Write the answer alone, in as few words as possible." \
      python3 -m benchmarks.gpu_multiturn "$out/dialogues" "$sets" --model "$model" --seconds "$seconds" --refresh-turns 1,3 \
      --units squad10:10:end+,2wikimqa:10:end+,squad10:5:end+,2wikimqa:5:end+,mtrag_un:5:end+,qmsum:5:end+ --decode-budget 1024 \
      --strategies "full,prefix,concat,concat:recompute=question,share=0.15,concat:recompute=sentences,share=0.15"
    ;;
  table) python3 -m benchmarks.sparse_table "$out/sparse.json" "$out" --record "$out/ragserve-sparse.json" ;;
  *) echo "no part $part" && exit 2 ;;
esac
