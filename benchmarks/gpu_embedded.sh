#!/usr/bin/env bash
# The embedded model's adapter, on one H200: questions, training, answers. Steps of at most eight minutes, each of which goes on where it was cut.
#   benchmarks/gpu_embedded.sh write PASSAGES WRITER OUT           5 min: pairs and rows of a model that writes (WRITER: the 1.5B)
#   benchmarks/gpu_embedded.sh train PASSAGES BASE OUT SECONDS     OUT/adapter, at most 8 MB (BASE: SmolLM2-135M-Instruct)
#   benchmarks/gpu_embedded.sh answer BASE OUT SETS_DIR SECONDS    answers of the base and of the adapted model, through the engine
# It needs, beside this checkout: PASSAGES (`benchmarks.written_questions.passages`, 7 MB); WRITER and BASE as folders (`benchmarks.real_models pack`
# and `unpack`); SETS_DIR with squad10, qed10, 2wikimqa, musique and the synthetic sets; an embedder's folder (RAGSERVE_EMBEDDER); peft and accelerate.
# What is to come back: OUT/rows.jsonl.gz, OUT/rows.json, OUT/adapter, OUT/train.json, OUT/answers-*. SECONDS of train counts loading; add 60 to it.
# RAGSERVE_ATTENTION names the engine's attention backend (triton or flashinfer where FA3's library is not there).
# `write` goes on from written_questions/pairs, with its eight processes and batches of 128; `train` takes its rows where OUT has none, so the first
# run may begin with `train`. Memory: write 9 to 22 GB a process; train 30 GB at packs of 16k tokens (10 where less than 48 GB are free); answer 12 GB an engine.
# Run `train` alone. Under MPS with a limit of threads, and with expandable_segments, it gave NaN from the first loss on; without these no value was
# not finite.
set -euo pipefail
step=$1
shift
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/index:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export FLASHINFER_DISABLE_VERSION_CHECK=1
written=benchmarks.written_questions
case $step in
  write)
    passages=$1 writer=$2 out=$3
    mkdir -p "$out"
    [ -f "$out/pairs-0.json" ] || cp benchmarks/written_questions/pairs/pairs-* "$out"
    # Several processes share the GPU, because each waits for the launches of small kernels most of the time. Another number of them, or another
    # batch, needs an OUT without pairs.
    python3 -m $written.write "$passages" "$out" "$writer" --workers "${PROCESSES:-8}" --questions "${QUESTIONS:-7}" --batch "${BATCH:-128}" \
      --seconds "${WRITE_S:-150}"
    python3 -m $written.join "$passages" "$out" "$writer" --workers "${PROCESSES:-8}" --seconds "${JOIN_S:-60}"
    python3 -m $written.rows make "$passages" "$out" "$out/rows.jsonl.gz"
    ;;
  train)
    passages=$1 base=$2 out=$3 seconds=$4
    mkdir -p "$out"
    [ -f "$out/rows.jsonl.gz" ] || cp benchmarks/written_questions/pairs/rows.jsonl.gz "$out"
    [ "$out/rows.jsonl" -nt "$out/rows.jsonl.gz" ] || python3 -m $written.rows expand "$passages" "$out/rows.jsonl.gz" "$out/rows.jsonl" --laid-out
    python3 -m $written.train "$base" "$out/rows.jsonl" "$out" --seconds "$seconds"
    ;;
  answer)
    base=$1 out=$2 sets=$3 seconds=$4
    real=squad10,qed10,2wikimqa,musique
    python3 -m $written.without_gold "$sets" "$out/none" squad10 qed10
    python3 - "$base" "$out/adapter" "$out/merged" <<'PY'
import shutil, sys
from pathlib import Path
from ragserve.engine.adapter_weights import merge_adapter
base, adapter, merged = map(Path, sys.argv[1:])
shutil.rmtree(merged, ignore_errors=True)
shutil.copytree(base, merged)
merge_adapter(merged, adapter)
PY
    ask() { # name, model, sets' folder, sets, strategies, further options
      local name=$1 model=$2 folder=$3 only=$4 strategies=$5
      shift 5
      python3 -m benchmarks.gpu_eval "$out/answers-$name" "$folder" --model "$model" --benchmark short-answers --only "$only" \
        --strategies "$strategies" --seconds "$seconds" --engines 1 "$@" >"$out/answers-$name.log" 2>&1 &
    }
    question=concat:recompute=question,share=0.05
    ask real "$out/merged" "$sets" $real "full,concat,$question"
    ask synthetic "$out/merged" "$sets" onehop,crossdoc "full,concat,$question" --limit 400
    ask none "$out/merged" "$out/none" squad10_none,qed10_none full
    ask base "$base" "$sets" $real full
    ask base-none "$base" "$out/none" squad10_none,qed10_none full
    wait
    tail -qn 2 "$out"/answers-*.log
    ;;
  *) echo "steps: write, train, answer" >&2; exit 2 ;;
esac
