#!/usr/bin/env bash
# Trains, saves, and resumes on another number of ranks. `make demo` runs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

run=checkpoints/run/demo
steps=40      # of the first part
all_steps=60  # of both parts; the learning rate schedule spans both

gpus=$(python -c 'import torch; print(torch.accelerator.device_count())')
# All GPUs, then half of them. With one GPU: on it, then on two CPU ranks.
case $gpus in
  0) first=2 second=1 ;;
  1) first=1 second=2 ;;
  *) first=$gpus second=$((gpus / 2)) ;;
esac
# The global batch is the same in both parts, so both numbers of ranks must divide it.
batch=$((first * second))
while ((batch < 16)); do batch=$((batch * 2)); done

train() {  # ranks, then the arguments of train_gpt.py
  local ranks=$1 threads
  shift
  # torchrun gives each rank one thread unless told otherwise. Half of the cores stay free: where
  # other jobs have them, OpenMP's threads wait for each other, and a step takes many times as long.
  threads=$(($(nproc) / ranks / 2))
  # Port 0: a free one, so that two demos can run side by side.
  OMP_NUM_THREADS=$((threads > 0 ? threads : 1)) PYTHONUNBUFFERED=1 \
    torchrun --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    examples/train_gpt.py --batch "$batch" --schedule-steps "$all_steps" "$@"
}

rm -rf "$run"

echo "== 1. Train a byte-level GPT on $first rank(s), optimizer state in host memory, and save =="
train "$first" --steps "$steps" --save "$run/part-1"

echo
echo "== 2. Resume that checkpoint on $second rank(s) and go on =="
train "$second" --steps "$all_steps" --resume "$run/part-1" --save "$run/part-2"

echo
echo "== 3. A policy learns to write: trainer and generator take turns on the device =="
OMP_NUM_THREADS=1 python examples/rl_phases.py --iterations 20

echo
echo "Shown: FSDP2 training with the optimizer's state in host memory, a checkpoint of $first" \
  "rank(s) resumed on $second; the line 'resumed at step' has the validation loss after and before;" \
  "then training that leaves the device in every iteration, and where the time went."
