"""Benchmarks: one job, one run, one table, and all figures as JSON.

``python -m fsdp_offload.bench`` trains one GPT under FSDP2 with each optimizer in turn and compares
whole iterations, without a synchronisation in between::

    python -m fsdp_offload.bench --json out.json                      # all rows, one GPU
    python -m fsdp_offload.bench --rows plain,forward,backward-bf16 --tokens 16384
    torchrun --nproc-per-node 4 -m fsdp_offload.bench --params 3.14e9 --dim 3200 --tokens 4096

Rows are named as in :mod:`.rows`. ``bench.phases`` measures how tensors leave the device and come
back. Studies, such as how long a checkpoint takes, are in ``docs/benchmarks/studies``.
"""
