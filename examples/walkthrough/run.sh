#!/bin/bash
# The whole walk-through on a CPU: bash examples/walkthrough/run.sh [FOLDER]. Ten minutes on two cores.
# `ulimit -d` limits the memory of every process, as a GPU's memory would: 16,384 whole tokens do not fit, an eighth does.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-walkthrough}
mkdir -p "$out" && cd "$out" || exit 1
ulimit -d 900000

must() { echo "$ $*"; "$@" || { echo "failed: $*"; exit 1; }; }
must_run_out() {  # the name of its output, then the command: it has to end with the advice
    local log=$1.txt; shift
    echo "$ $*"; "$@" 2>&1 | tee "$log"
    grep -q "out of memory.*context_parallel_degree" "$log" || { echo "did not run out of memory: $*"; exit 1; }
}

[ -d channels ] || must octavo prepare "$here/prepare.toml" --channels channels
must_run_out estimator-no-context python "$here/estimator.py" --context 1 --name no-context
must python "$here/estimator.py" --name context
must python "$here/estimator.py" --fp8 --name context-fp8

must_run_out run-no-context octavo train "$here/train.toml" --ranks 8 parallel.context_parallel_degree=1 train.global_batch=8 \
    train.output=runs/no-context
must octavo train "$here/train.toml" --ranks 8 train.output=runs/context
must octavo train "$here/train.toml" --ranks 8 train.output=runs/context-fp8 fp8.enabled=true
must python "$here/table.py" . --length 16384 --gpus 8 --warmup 1
