#!/usr/bin/env bash
# Train a model for reuse with `ragserve adapt` on one GPU, in legs, then ask base and adapted model what none of their questions was trained on.
#   gpu_adapt.sh leg MODEL ROWS.jsonl WORK LEG_OUT SECONDS [OPTIONS of ragserve adapt]
#       Train, or go on, for so many seconds. LEG_OUT gets what the next leg needs, in files below 16 MiB at rank 6 and 1.5B: copy it to
#       WORK on another machine. Once the training is over, MODEL-adapted is beside WORK, and LEG_OUT has its record and adapter.
#   gpu_adapt.sh evaluate BASE ADAPTED SETS_DIR OUT SECONDS
#       Ask both over SETS_DIR's squad10, qed10, 2wikimqa and musique, through the engine, and write OUT/adapted-answers.json: LIMIT questions a
#       set (100), ENGINES of each model (3). RAGSERVE_EMBEDDER names the embedder of `passages`, RAGSERVE_ATTENTION the attention backend.
# Rows: `benchmarks.written_questions.rows expand`, which share no passage with these sets; its `shared` checks that.
set -uo pipefail
step=$1
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_DISABLE_VERSION_CHECK=1
case $step in
  leg)
    model=$1 rows=$2 work=$3 out=$4 seconds=$5
    shift 5
    adapted=$(dirname "$work")/$(basename "$model")-adapted
    mkdir -p "$out"
    timeout -s INT -k 30 "$seconds" python3 -m ragserve.cli adapt "$model" "$adapted" --data "$rows" --work "$work" \
      --rank 6 --top-k 20 --minutes 20 "$@" 2>&1 | tee "$out/log"
    if [ -d "$adapted" ]; then
      cp -r "$adapted/adapter" "$adapted/ragserve-adapt.json" "$out"
    else
      python3 -m benchmarks.packed_adaptation "$work" "$out"
    fi
    ;;
  evaluate)
    base=$1 adapted=$2 sets=$3 out=$4 seconds=$5
    best=passages.keep=0.25
    mkdir -p "$out"
    for name in base adapted; do
      strategies=full,concat,concat:$best,passages:keep=0.25
      [ $name = adapted ] && strategies+=,concat:recompute=question,share=0.02
      python3 -m benchmarks.gpu_eval "$out/$name" "$sets" --model "${!name}" --benchmark short-answers --only squad10,qed10,2wikimqa,musique \
        --strategies "$strategies" --engines "${ENGINES:-3}" --in-flight 8 --limit "${LIMIT:-100}" --seconds "$seconds" --first 2 >"$out/$name.log" 2>&1 &
    done
    wait
    python3 -m benchmarks.answer_table "$out/adapted-answers.json" "base=$out/base" "adapted=$out/adapted" --full base
    ;;
esac
