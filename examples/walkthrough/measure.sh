#!/bin/bash
# The table of the walk-through on two H200s: bash examples/walkthrough/measure.sh [FOLDER]. Minutes; run it in the repository.
# Without recomputation, with which 8B fits whole. Each step runs by its run file, then by the estimator; a step that runs out of
# memory is a row, too.
set -u
export OCTAVO_COMPAT_REPLACE=1  # Octavo's layers also where Transformer Engine is installed
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-walkthrough-8b}
mkdir -p "$out" && cd "$out" || exit 1

[ -d channels ] || octavo prepare "$here/prepare.toml" data.sequence_length=32768 data.vocab_size=32768 \
    data.max_documents=4000 --channels channels || exit 1
[ -f llama-8b/config.json ] || { mkdir -p llama-8b && python - <<'PY'
import json
from octavo.models.shapes import SHAPES
with open("llama-8b/config.json", "w") as file:
    json.dump(SHAPES["llama-8b"] | {"architectures": ["LlamaForCausalLM"]}, file)
PY
}

step() {  # name, context degree, global batch, fp8
    octavo train "$here/train-8b.toml" --ranks 2 data.source=channels/train/training.json \
        data.validation_source=channels/test/validation.json "train.output=runs/$1" \
        "parallel.context_parallel_degree=$2" "train.global_batch=$3" "fp8.enabled=$4" 2>&1 | tee "run-$1.txt"
    rm -rf "runs/$1/checkpoints"  # 96 GB each
    local flag=; [ "$4" = true ] && flag=--fp8
    python "$here/estimator.py" --context "$2" --shard 2 $flag --instance ml.p5en.48xlarge --model llama-8b --length 32768 \
        --vocabulary 128256 --checkpointing 0 --lr 1e-4 --steps 20 --name "$1" 2>&1 | tee "estimator-$1.txt"
}

step no-context 1 2 false
step context 2 1 false
step context-fp8 2 1 true
python "$here/table.py" . --length 32768 --gpus 2
