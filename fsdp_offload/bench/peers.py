"""Other optimizers that offload, each optional: a row of one that is missing says so.

``cpuoffload``: FSDP2's ``CPUOffloadPolicy`` with torch's fused AdamW on the CPU. ``torchao``:
``CPUOffloadOptimizer``. ``deepspeed``: ZeRO-2 with the optimizer on the CPU, in place of FSDP2.
``megatron``: megatron-core's ``HybridDeviceOptimizer`` with fp32 masters and its overlap.
They get as many threads as there are cores per rank, whatever torchrun's default is.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import AdamW

from ..errors import ConfigError
from .cases import Case
from .machine import cores_per_rank
from .model import Job, sharded_model, unsharded_model
from .trainers import Batch, Trainer, torch_clip


class _ThreadedTrainer(Trainer):
    """Its optimizer computes on the CPU."""

    def __init__(self, model: nn.Module, optimizer: Any, clip: Any = None) -> None:
        super().__init__(model, optimizer, clip)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(cores_per_rank())

    def device_state_bytes(self) -> int:
        return 0

    def close(self) -> None:
        torch.set_num_threads(self._threads)


class _MegatronTrainer(_ThreadedTrainer):
    """The optimizer holds plain parameters over the shards' memory."""

    def __init__(self, model: nn.Module, shards: Sequence[tuple[Tensor, Tensor]], optimizer: Any):
        super().__init__(model, optimizer)
        self._shards = shards

    def update(self) -> None:
        for parameter, shard in self._shards:
            gradient = parameter.grad
            shard.grad = None if gradient is None else getattr(gradient, "_local_tensor", gradient)
        self.optimizer.step()
        for parameter, shard in self._shards:
            parameter.grad = shard.grad = None


class _DeepSpeedTrainer(_ThreadedTrainer):
    """The engine does all of it."""

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

    def forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self.optimizer(*batch)
        return loss

    def update(self) -> None:
        self.optimizer.step()

    def close(self) -> None:
        super().close()
        self.optimizer.destroy()


def _cpu_offload(case: Case, job: Job, device: torch.device) -> Trainer:
    model = sharded_model(job, device, CPUOffloadPolicy(pin_memory=device.type == "cuda"))
    optimizer = AdamW(model.parameters(), lr=job.lr, fused=True)
    clip = torch_clip(model) if case.clip != "none" else None
    return _ThreadedTrainer(model, optimizer, clip)


def _torchao(case: Case, job: Job, device: torch.device) -> Trainer:
    optim = importlib.import_module("torchao.optim")
    model = unsharded_model(job, device)  # it knows no DTensors
    if dist.get_world_size() > 1:
        raise ConfigError(
            f"torchao on {dist.get_world_size()} ranks",
            reason="its CPUOffloadOptimizer is for one GPU",
            remedy="leave the row out",
        )
    optimizer = optim.CPUOffloadOptimizer(model.parameters(), AdamW, fused=True, lr=job.lr)
    return _ThreadedTrainer(model, optimizer)


def _megatron(case: Case, job: Job, device: torch.device) -> Trainer:
    module = importlib.import_module("megatron.core.optimizer.cpu_offloading")
    model = sharded_model(job, device)
    pairs = []
    for parameter in model.parameters():
        local = getattr(parameter.data, "_local_tensor", parameter.data)
        pairs.append((parameter, nn.Parameter(local)))
    optimizer = module.HybridDeviceOptimizer(
        [shard for _, shard in pairs],
        offload_fraction=1.0,
        cpu_optimizer_cls=AdamW,
        gpu_optimizer_cls=AdamW,
        param_update_in_fp32=job.shards == "bf16",
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=job.lr,
        fused=True,
    )
    return _MegatronTrainer(model, pairs, optimizer)


def _deepspeed(case: Case, job: Job, device: torch.device) -> Trainer:
    deepspeed = importlib.import_module("deepspeed")
    adam = importlib.import_module("deepspeed.ops.adam")
    model = unsharded_model(job, device)
    optimizer = adam.DeepSpeedCPUAdam(model.parameters(), lr=job.lr, adamw_mode=True)
    config = {
        "train_micro_batch_size_per_gpu": job.batch,
        "bf16": {"enabled": job.shards == "bf16"},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return _DeepSpeedTrainer(model, engine)


_MAKERS = {
    "cpuoffload": _cpu_offload,
    "torchao": _torchao,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}


def peer_trainer(case: Case, job: Job, device: torch.device) -> Trainer:
    """The trainer of a peer's row.

    Raises:
        ImportError: it is not installed.
        ConfigError: it cannot do what the row asks for.
    """
    if case.clip != "none" and case.kind != "cpuoffload":
        raise ConfigError(
            f"row {case.name!r}", reason="this peer is not clipped here", remedy="leave it out"
        )
    if case.kind == "deepspeed" and job.shards == "fp32":
        raise ConfigError(
            f"row {case.name!r}",
            reason="ZeRO has no bf16 computation over fp32 shards",
            remedy="use --shards bf16",
        )
    return _MAKERS[case.kind](case, job, device)
