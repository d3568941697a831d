#!/usr/bin/env bash
# Train a model for reuse with `ragserve adapt` on one GPU, in legs, then ask base and adapted model what none of their questions was trained on.
#   gpu_adapt.sh leg MODEL ROWS.jsonl WORK LEG_OUT SECONDS [OPTIONS of ragserve adapt]
#       Train, or go on, for so many seconds. LEG_OUT gets what the next leg needs, in files below 16 MiB at rank 6 and 1.5B: copy it to
#       WORK on another machine. Once the training is over, MODEL-adapted is beside WORK, and LEG_OUT has its record and adapter.
#   gpu_adapt.sh evaluate BASE ADAPTED SETS_DIR EMBEDDER OUT SECONDS
#       Emulate both over SETS_DIR/{squad10,qed10,2wikimqa,musique}.jsonl.gz and print the recovered margins.
# Rows: `benchmarks.written_questions`, which shares no passage with these sets; its `shared` checks that.
set -uo pipefail
step=$1
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
processes=${PROCESSES:-6}
case $step in
  leg)
    model=$1 rows=$2 work=$3 out=$4 seconds=$5
    shift 5
    adapted=$(dirname "$work")/$(basename "$model")-adapted
    mkdir -p "$out"
    timeout -s INT -k 30 "$seconds" python3 -m ragserve.cli adapt "$model" "$adapted" --data "$rows" --work "$work" \
      --rank 6 --minutes 20 "$@" 2>&1 | tee "$out/log"
    if [ -d "$adapted" ]; then
      cp -r "$adapted/adapter" "$adapted/ragserve-adapt.json" "$out"
    else
      python3 -m benchmarks.adapted_answers pack "$work" "$out"
    fi
    ;;
  evaluate)
    base=$1 adapted=$2 sets=$3 embedder=$4 out=$5 seconds=$6
    mkdir -p "$out"
    files=("$sets"/{squad10,qed10,2wikimqa,musique}.jsonl.gz)
    for name in base adapted; do
      for ((k = 0; k < processes; k++)); do
        python3 -m benchmarks.document_prefixes run "${!name}" "$out/$name-all-$k.json" "${files[@]}" --half all --shard "$k/$processes" \
          --prefixes "fixed 512" --shares 0,0.02 --seconds "$seconds" >"$out/$name-all-$k.log" 2>&1 &
      done
      wait
      for ((k = 0; k < processes; k++)); do
        python3 -m benchmarks.recompute_rules run "${!name}" "$out/$name-best-$k.json" "${files[@]}" --half all --shard "$k/$processes" \
          --embedder "$embedder" --rules question --shares 0.02 --seconds "$seconds" >"$out/$name-best-$k.log" 2>&1 &
      done
      wait
    done
    python3 -m benchmarks.adapted_answers table "$out" --report "$out/adapted-answers.json"
    ;;
esac
