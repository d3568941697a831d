#!/usr/bin/env bash
# The embedded model's selection, verification and heads on a GPU, in bfloat16, in parts that each fit into ten minutes:
#   benchmarks/gpu_selection.sh OUT SETS_DIR profile   samkv's profile and the streaming heads (two minutes)
#   benchmarks/gpu_selection.sh OUT SETS_DIR kept      what the engine's selections keep of the answers (three)
#   benchmarks/gpu_selection.sh OUT SETS_DIR gate      the gate's record: shares recomputed on crossdoc and onehop (five)
#   benchmarks/gpu_selection.sh OUT SETS_DIR main      F1 of the main strategies on the sets of eval-h200.json (six, or as long as there is)
#   benchmarks/gpu_selection.sh OUT SETS_DIR curve     F1 over the share kept, and of questions in other spellings (nine, or as long as there is)
#   benchmarks/gpu_selection.sh OUT SETS_DIR eval      F1 of all selections and rules on all sets (until it is stopped)
# `profile` comes first: what is verified is verified with the profile. gate, main, curve and eval go on where they stopped.
# LIMIT, SECONDS_EACH and ENGINES change questions a set, seconds of gate, main, curve and eval, and engines on the GPU.
# RAGSERVE_ATTENTION names SGLang's attention backend for all parts.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd) sets=$(cd "$2" && pwd) part=$3
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FLASHINFER_DISABLE_VERSION_CHECK=1 HF_HUB_OFFLINE=1
# the same options for ragserve's own commands, as the setting engine_args
RAGSERVE_ENGINE_ARGS=${RAGSERVE_ENGINE_ARGS:-$(python3 -c 'import json; from benchmarks.lib.fan_out import engine_args; print(json.dumps(engine_args(None)))')}
export RAGSERVE_ENGINE_ARGS
model=examples/models/ragserve-tiny

case $part in
profile)
  python3 -m ragserve.cli calibrate --part samkv --sets 8 --questions 12 --data-dir "$out/data" > "$out/samkv.txt" 2>&1 &
  python3 -m ragserve.cli calibrate --part heads --out "$out/heads.json" > "$out/heads.txt" 2>&1
  heads=$?
  wait $! || { tail -n 3 "$out/samkv.txt" && exit 1; }
  for place in "$model" "$out/data"; do [ -f "$place/ragserve-samkv.json" ] && cp "$place/ragserve-samkv.json" "$out/"; done
  tail -n 8 "$out/samkv.txt" "$out/heads.txt"
  exit $heads
  ;;
kept)
  python3 -m benchmarks.gpu_selection "$out/selection-kept.json" "$sets" --limit "${LIMIT:-200}" > "$out/kept.txt" 2>&1 || { tail -n 3 "$out/kept.txt" && exit 1; }
  ;;
gate)
  strategies="full"
  for share in 0.1 0.15 0.2 0.3; do strategies+=",concat:recompute=sentences,share=$share"; done
  strategies+=",samkv,samkv:keep=0.25"
  python3 -m benchmarks.gpu_eval "$out/gate" "$sets" --only crossdoc,onehop --limit "${LIMIT:-400}" \
    --engines "${ENGINES:-5}" --seconds "${SECONDS_EACH:-400}" --strategies "$strategies"
  ;;
main)
  strategies="full,concat,epic:first=16,cacheblend:share=0.15,concat:recompute=sentences,share=0.1"
  strategies+=",concat:recompute=sentences,share=0.3,samkv,samkv:keep=0.15"
  only=${ONLY:-onehop,crossdoc,mid_onehop,mid_crossdoc,long_onehop,long_crossdoc,needle,2wikimqa,musique}
  python3 -m benchmarks.gpu_eval "$out/main" "$sets" --only "$only" --limit "${LIMIT:-100}" \
    --engines "${ENGINES:-8}" --seconds "${SECONDS_EACH:-360}" --strategies "$strategies"
  ;;
curve)
  # of every question first what the targets are about, then the rest of the curve; MORE: further strategies, after the first
  paper="experimental.question_query=mean,experimental.scoring=zscore,update=fusion"
  plain="experimental.feedback_weight=0,experimental.retrieval_weight=0"
  first="full,samkv:keep=0.25,samkv:keep=0.15,samkv:keep=0.4,samkv:selection=layers,keep=0.25,$paper,samkv:keep=0.25,recompute=all"
  first+=",concat:recompute=sentences,share=0.1"
  rest="samkv:keep=0.05,samkv:keep=0.1,samkv:keep=0.25,$plain,concat:recompute=question,share=0.1,concat:recompute=anchors,share=0.1"
  rest+=",samkv:keep=0.6,samkv:selection=layers,keep=0.15,$paper,samkv:selection=layers,keep=0.4,$paper,samkv:keep=0.15,$plain,samkv:keep=0.4,$plain"
  python3 -m benchmarks.lib.spelled_sets "$out/spelled-sets" "$sets" --only "${SPELLED:-qed10,squad10,2wikimqa}" --limit "${LIMIT:-100}" > "$out/spelled.txt" || exit 1
  spelled=$(cd "$out/spelled-sets" && ls | sed 's/\.jsonl$//' | paste -sd,)
  python3 -m benchmarks.gpu_eval "$out/spelled" "$out/spelled-sets" --only "$spelled" --limit "${LIMIT:-100}" \
    --engines "${SPELLED_ENGINES:-3}" --seconds "${SECONDS_EACH:-480}" --strategies "full,samkv:keep=0.25" >> "$out/spelled.txt" 2>&1 &
  python3 -m benchmarks.gpu_eval "$out/curve" "$sets" --only "${ONLY:-qed10,squad10,2wikimqa,crossdoc}" --limit "${LIMIT:-100}" --first 7 \
    --engines "${ENGINES:-7}" --seconds "${SECONDS_EACH:-480}" --strategies "$first${MORE:+,$MORE},$rest"
  curve=$?
  wait $! || { tail -n 3 "$out/spelled.txt"; exit 1; }
  exit $curve
  ;;
eval)
  strategies="full,samkv"
  for keep in 0.05 0.1 0.15 0.25 0.4; do strategies+=",samkv:keep=$keep"; done
  for p in 0.5 0.7; do strategies+=",samkv:top_p=$p"; done
  for keep in 0.15 0.25 0.4; do
    strategies+=",samkv:keep=$keep,experimental.feedback_weight=0,experimental.retrieval_weight=0"
    strategies+=",samkv:selection=layers,keep=$keep,experimental.question_query=mean,experimental.scoring=zscore,update=fusion"
    strategies+=",samkv:selection=shared,keep=$keep"
  done
  for share in 0.1 0.2; do strategies+=",concat:recompute=question,share=$share,concat:recompute=anchors,share=$share,concat:recompute=sentences,share=$share,cacheblend:share=$share"; done
  strategies+=",epic:first=16"
  only=${ONLY:-qed10,squad10,2wikimqa,musique,onehop,crossdoc,mid_onehop,mid_crossdoc,long_onehop,long_crossdoc,needle,alias}
  python3 -m benchmarks.gpu_eval "$out/eval" "$sets" --only "$only" --limit "${LIMIT:-100}" \
    --engines "${ENGINES:-5}" --seconds "${SECONDS_EACH:-480}" --strategies "$strategies"
  ;;
*)
  echo "unknown part $part: profile, kept, gate, main, curve or eval" >&2
  exit 2
  ;;
esac
