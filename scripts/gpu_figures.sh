#!/bin/sh
# The figures of docs/performance.md on an accelerator, in one file: scripts/gpu_figures.sh [--dry-run | FILE]
# Goes on where a command fails, and says so in the file; exits with 1 then, and with 2 where there is no accelerator.
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-.venv/bin/python}
SMOLLM2=checkpoints/SmolLM2-135M-Instruct
# vLLM's executable, checkpoints and problems of the last two; a command whose files are missing says so and fails.
VLLM=${VLLM:-vllm}
QWEN_05B=${QWEN_05B:-checkpoints/Qwen2.5-0.5B-Instruct}
QWEN_7B=${QWEN_7B:-checkpoints/Qwen2.5-7B-Instruct}
GSM8K=${GSM8K:-data/gsm8k/train.jsonl}

# Learner and vLLM on one card: its share, somewhat more than penstock fit says, the checkpoint, and what else is said.
external() {
    share=$1 model=$2
    shift 2
    echo "$PYTHON -m benchmarks.external --vllm $VLLM --vllm-share $share --memory-fraction 0.5" \
        "--model $model --problems $GSM8K --dtype bfloat16 --groups 8 --samples 8 --prompt-tokens 256 --tokens 256" \
        "--updates 100 --seeds 2 $*"
}

commands() {
    cat <<EOF
$PYTHON -m penstock doctor
$PYTHON -m penstock train cats --dry-run
$PYTHON -m benchmarks.generation --repeats 9
$PYTHON -m benchmarks.update --repeats 9
$PYTHON -m benchmarks.attention
$PYTHON -m benchmarks.utilisation
$PYTHON -m benchmarks.steps --steps 12
$PYTHON -m benchmarks.learning cats --seeds 3
$PYTHON -m benchmarks.learning arithmetic --seeds 1 --control
make $SMOLLM2/config.json
$PYTHON -m penstock doctor $SMOLLM2 model.dtype=bfloat16
$PYTHON -m penstock train gsm8k_smollm2 steps=50 --quiet
make test-smollm2
$(external 0.15 $QWEN_05B --rank 0 --weights directory --learning-rate 1e-6)
$(external 0.35 $QWEN_7B --rank 16 --weights lora --learning-rate 1e-5)
EOF
}

if [ "${1:-}" = --dry-run ]; then
    commands
    exit 0
fi
if [ $# -ne 1 ]; then
    echo "usage: scripts/gpu_figures.sh [--dry-run | FILE]" >&2
    exit 2
fi
if ! "$PYTHON" -c 'import sys, jax; sys.exit(jax.default_backend() == "cpu")'; then
    echo "JAX computes on a CPU here: install NVIDIA's driver and pip install 'penstock[cuda]' (docs/gpu.md)" >&2
    exit 2
fi
failed=0
{
    date -u
    git rev-parse HEAD
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
} >"$1" 2>&1
commands >"$1.commands"
while IFS= read -r command; do
    printf '\n$ %s\n' "$command" | tee -a "$1"
    $command >>"$1" 2>&1 </dev/null || { echo "failed with exit code $?" | tee -a "$1"; failed=1; }
done <"$1.commands"
rm "$1.commands"
exit $failed
