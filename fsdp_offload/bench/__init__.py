"""Benchmarks: each case returns numbers measured in one run on one machine."""
