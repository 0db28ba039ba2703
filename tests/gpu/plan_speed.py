"""Predictions beside measured steps: rates of this machine, then each lane and ``auto``.

Usage: ``python tests/gpu/plan_speed.py [--layers 24] [--iterations 10]``. The default is the
GPT-shaped list of 1.33 G parameters of ``fsdp_offload.bench.step``; medians over the iterations.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from fsdp_offload import HybridDeviceOptimizer, TransferConfig
from fsdp_offload.bench.step import gpt_shapes, make_parameters, median_ms
from fsdp_offload.device import gateway_for
from fsdp_offload.pipeline import calibration
from fsdp_offload.pipeline.calibration import measure_rates


def main() -> None:
    """Print rates three times, then a table per lane and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=10)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    transfer, gateway = TransferConfig(), gateway_for(torch.device("cuda"))
    for _ in range(3):
        calibration._known.clear()
        began = time.perf_counter()
        rates = measure_rates(gateway, transfer)
        print(f"{time.perf_counter() - began:.2f} s: {rates}")
    shapes = gpt_shapes(options.layers)
    for dtype in (torch.bfloat16, torch.float32):
        for update_on in ("device", "host", "auto"):
            parameters = make_parameters(shapes, dtype)
            optimizer = HybridDeviceOptimizer(
                torch.optim.AdamW(parameters), update_on=update_on, transfer=transfer
            )
            for _ in range(3):
                optimizer.step()

            def step(optimizer: HybridDeviceOptimizer = optimizer) -> None:
                optimizer.step()
                optimizer.synchronize()

            measured_ms = median_ms(step, options.iterations)
            print(f"== {dtype} update_on={update_on}")
            print(optimizer._inventory.made.explain(measured_ms, rates=rates))
            optimizer.close()
            del optimizer, parameters, step
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
