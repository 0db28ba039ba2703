from __future__ import annotations
from typing import Any
import pytest
import torch
from torch.optim import Optimizer
from tests.optimizer_table import *
from tests.twins import *

def build(setting, **changed):
    def make(groups: list[dict[str, Any]]) -> Optimizer:
        optimizer = setting.build(groups, **changed)
        for group in optimizer.param_groups[1:]:
            group["lr"] = group["lr"] * 3
            if "weight_decay" in group: group["weight_decay"] = 0.03
        return optimizer
    return make

def shapes_for(setting):
    if setting.name == "Muon": return MATRICES
    return SHAPES if setting.takes_empty else [s for s in SHAPES if 0 not in s]

@pytest.mark.parametrize("fraction", [0, .25, .5, 1])
@pytest.mark.parametrize("setting", settings("open", "foreach", "fused"), ids=str)
def test_device(setting, fraction):
    t = Twins(build(setting), shapes=shapes_for(setting), offload_fraction=fraction)
    t.run()
@pytest.mark.parametrize("setting", settings("open", "foreach", "fused"), ids=str)
def test_host(setting):
    if setting.name == "Muon": return
    pb = build(setting, fused=True) if setting.implementation=="open" and setting.name in FUSED else build(setting)
    t = Twins(build(setting), shapes=shapes_for(setting), update_on="host", plain_build=pb)
    t.run()
@pytest.mark.parametrize("lane", ["resident", "streamed", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setting", settings("open", "foreach", "fused"), ids=str)
def test_half(setting, dtype, lane):
    if setting.name == "Muon" and lane == "host": return
    pb = build(setting, fused=True) if setting.implementation=="open" and setting.name in FUSED and lane == "host" else build(setting)
    sh = shapes_for(setting)
    t = Twins(build(setting), shapes=sh, update_on=[lane]*len(sh), plain_build=pb, dtypes=[dtype], plain_dtype=torch.float32)
    t.run()
