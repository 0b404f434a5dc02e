#!/usr/bin/env bash
# Make the tiny checkpoint from nothing: train, score, convert, score again. Needs one NVIDIA GPU and exllamav3 1.5.1.
# Run it in the repository root:   WORK=build/tiny SECONDS_MAX=900 [GPUS=2] models/tiny/recipe/make_model.sh [train options]
set -euo pipefail
work=${WORK:-build/tiny}
mkdir -p "$work"
python=${PYTHON:-python3}
recipe=models.tiny.recipe
train="-m $recipe.train"
if [ "${GPUS:-1}" -gt 1 ]; then train="-m torch.distributed.run --standalone --nproc-per-node $GPUS -m $recipe.train"; fi
# shellcheck disable=SC2086  (words on purpose)
"$python" $train --out "$work/source" --seconds "${SECONDS_MAX:-900}" "$@" 2>&1 | tee "$work/train.log"
"$python" -m $recipe.heldout --weights "$work/source/model.safetensors" --out "$work/heldout.jsonl"
"$python" -m $recipe.calibration --out "$work/calibration.safetensors" --rows 256
"$python" -m $recipe.evaluate_hf --checkpoint "$work/source" --heldout "$work/heldout.jsonl" \
  --out "$work/scores_source.json" ${LIMIT:+--limit "$LIMIT"} > "$work/evaluate_hf.log" 2>&1 &
scoring=$!
"$python" -m exllamav3.conversion.convert_model -i "$work/source" -o "$work/exl3" -w "$work/convert" \
  -b 3 -mb 3 -vb 16 -cb mul1 -cd "$work/calibration.safetensors" -cr 256 -cc 512 > "$work/convert.log" 2>&1
"$python" -m $recipe.evaluate_exl3 --checkpoint "$work/exl3" --heldout "$work/heldout.jsonl" \
  --out "$work/scores_exl3.json"
wait $scoring
tail -n 1 "$work/evaluate_hf.log"
