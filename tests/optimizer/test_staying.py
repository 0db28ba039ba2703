"""Buckets that stay on the device, others at every step: the same numbers."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_offload.core.devices import CpuBackend, backend_for
from tests.away import optimizer_alone
from tests.helpers.compare import same
from tests.helpers.policies import POLICIES
from tests.helpers.simulator import StreamSimulator, use_backend
from tests.optimizer.test_overlap_waits import BF16, CPU, FP32, Job, Scenario


class Moving(Job):
    """Between two iterations, some buckets come to the device and some leave it."""

    def __init__(self, course: str, *given: Any, **how: Any) -> None:
        self.random = random.Random(course)
        super().__init__(*given, **how)

    def between(self, step: int) -> None:
        super().between(step)
        event = self.random.choice(["nothing", "read", "write", "load", "offload"])
        for lane in [self.optimizer._updates.reserved.engine.ring]:
            order = list(range(len(lane.buckets)))
            self.random.shuffle(order)
            staying = self.random.sample(order, self.random.randint(0, len(order)))
            least = int(len(staying) < len(order))
            lane.arrange(order, staying, self.random.randint(least, 4))
        if event == "read":
            assert all(self.optimizer.state[p] for p in self.trained)
        elif event == "write":  # the value that is there
            for p in self.trained:
                self.optimizer.state[p]["exp_avg"].mul_(1.0)
        elif event == "load":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif event == "offload":
            with optimizer_alone(self.optimizer).away():
                pass


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_numbers_do_not_depend_on_what_stays(overlap: str, dtype: Any, policy: str) -> None:
    scene = Scenario(overlap, ("streamed",), dtype, 30_000, steps=5)
    with use_backend(CpuBackend(CPU)):
        expected = Job(scene, backend_for(CPU), plain=True).train()
    course = f"{overlap} {dtype} {policy}"  # of each another one
    with StreamSimulator(policy) as simulator:
        found = Moving(course, scene, simulator, plain=False).train()
    assert same(found, expected)
    assert simulator.late_uses == []


def test_where_there_is_no_memory_everything_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scenario("forward")
    with use_backend(CpuBackend(CPU)):
        expected = Job(scene, backend_for(CPU), plain=True).train()
        job = Job(scene, backend_for(CPU), plain=False)
        engine = job.optimizer._updates.reserved.engine
        lane, between = engine.ring, job.between

        def fill(step: int) -> None:
            """Ask for more than there is."""
            between(step)
            order, staying = list(lane.order), list(lane.staying)
            with monkeypatch.context() as patch:
                patch.setattr(CpuBackend, "allocate", mock.Mock(side_effect=torch.OutOfMemoryError))
                with pytest.raises(torch.OutOfMemoryError):
                    lane.arrange(order[::-1], order)
            assert (lane.order, list(lane.staying)) == (order, staying)
            lane.arrange(order, order[: step + 1])

        job.between = fill  # type: ignore[method-assign]
        assert same(job.train(), expected)
