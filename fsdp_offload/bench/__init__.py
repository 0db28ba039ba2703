"""Benchmarks: each case returns numbers measured in one run on one machine.

``python -m fsdp_offload.bench`` trains one GPT with each optimizer in turn and compares whole
iterations, without a synchronisation in between, with the physical bound::

    python -m fsdp_offload.bench --json out.json                      # all rows, one GPU
    python -m fsdp_offload.bench --rows plain,forward,backward-bf16 --tokens 16384
    torchrun --nproc-per-node 4 -m fsdp_offload.bench --params 3.14e9 --dim 3200 --tokens 4096
    python -m fsdp_offload.bench --rows plain,backward --trace trace.json
    python -m fsdp_offload.bench table out.json

Rows are named as in :mod:`.cases`. ``bench.accuracy`` compares the precisions of moments on a
training run; ``bench.step``, ``bench.checkpoint`` and ``bench.local`` measure single parts.
"""
