"""Benchmarks: one job, one run, one table, and all figures as JSON.

``fsdp-offload bench`` trains one GPT under FSDP2 with each optimizer in turn and compares whole
iterations, without a synchronisation in between; rows are named as in :mod:`.rows`.
"""
