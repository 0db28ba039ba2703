"""``HybridDeviceOptimizer``: any dense torch optimizer with its state in host memory.

Usage::

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    optimizer = HybridDeviceOptimizer(optimizer, model=model)

Guarantees: the numbers are those of the wrapped optimizer (bit for bit in the device lanes; of
torch's CPU kernel in the host lane); a parameter without gradient is not touched; shards are
written in place; no collective is issued for element-wise optimizers.

Limits, each refused with a typed error: LBFGS, SparseAdam, ``differentiable=True``, sparse
gradients, non-contiguous shards, ``CPUOffloadPolicy``, parameters on several devices, CUDA graph
capture of ``step()``, copying or pickling the wrapper, use in a forked process.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import loading, shards
from .config import OffloadConfig, PrecisionConfig, TransferConfig
from .errors import ClosedError, ConfigError, LaneError, OffloadError, StateSchemaError
from .pipeline import state as state_io
from .pipeline.engine import Segment
from .pipeline.inventory import Inventory, Member
from .pipeline.records import Record, Snapshot, Work
from .pipeline.shadow import step_idle_groups
from .wrapping import check_wrappable, gateway_of, make_inert, modules_of, share_hooks


@dataclass(frozen=True)
class Statistics:
    """What the optimizer holds, and what its last step did, on this rank."""

    steps: int
    """Calls of ``step()`` since construction."""
    parameters: dict[str, int]
    """Trainable parameters per lane; ``native`` ones keep the state their class makes."""
    device_state_bytes: int
    """State that stays on the device."""
    host_state_bytes: int
    """State in host memory: payload."""
    host_arena_bytes: int
    """Host memory taken for it, alignment and staging included."""
    pinned: bool
    """Whether all of that memory is page-locked."""
    pin_seconds: float
    """Seconds that touching and page-locking it took."""
    staging_bytes: int
    """Device memory of slots, scratch and staging rings."""
    buckets: int
    """Units of update per step."""
    moved_bytes: int
    """Bytes that the last step moved in each direction."""
    step_ms: float
    """Host milliseconds of the last ``step()``; the device may still have been at work."""


class HybridDeviceOptimizer(Optimizer):
    """Wraps ``optimizer`` and keeps its state in host memory.

    Args:
        optimizer: any dense torch optimizer: fresh, stepped or loaded. It becomes inert: its
            ``step``, ``zero_grad``, ``state_dict``, ``load_state_dict`` and ``add_param_group``
            forward to the wrapper; hooks and group dicts are shared.
        model: the module (or modules) whose parameters it holds: gives names, the update order,
            and lets loads into the module be noticed.
        offload_fraction: share of state bytes, 0 to 1 (default), that leaves the device; met
            within the largest parameter.
        device_budget: instead of it, bytes (or "8GiB") of state that may stay on each device.
        update_on: where offloaded state is updated: ``"device"``, ``"host"``, ``"auto"``
            (= device), or one lane name per trainable parameter in ``param_groups`` order.
        overlap: ``"step"``: all transfers run inside ``step()``.
        precision: see :class:`PrecisionConfig`.
        transfer: see :class:`TransferConfig`.

    Raises:
        ConfigError: an argument is wrong; ``UnsupportedOptimizerError`` and
            ``UnsupportedParameterError`` are kinds of it.
        DeviceError: no accelerator, or parameters on several devices.
        HostMemoryError: the state does not fit into host memory.
        PinningError: the driver refused to page-lock it.
    """

    is_offloaded = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        offload_fraction: float | None = None,
        device_budget: int | str | None = None,
        update_on: str | Sequence[str] = "auto",
        overlap: str = "step",
        precision: PrecisionConfig | None = None,
        transfer: TransferConfig | None = None,
    ) -> None:
        self._config = OffloadConfig.make(
            offload_fraction=offload_fraction,
            device_budget=device_budget,
            update_on=update_on,
            overlap=overlap,
            precision=precision,
            transfer=transfer,
        )
        check_wrappable(optimizer)
        models = modules_of(model)
        self._gateway = gateway_of(p for group in optimizer.param_groups for p in group["params"])
        self._inner, self._pid = optimizer, os.getpid()
        self._segments: list[Segment] = []
        self._records: list[Record] = []
        self._addresses: list[int] = []
        self._reserved: set[Tensor] = set()
        self._shown: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self._failure: BaseException | None = None
        self._built = self._closed = self._loaded_since_step = False
        self._steps, self._step_ms = 0, 0.0
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._inventory = Inventory(optimizer, models, self._config, self._gateway.device)
        try:
            self._extend(self._inventory.trainable())
            self._take_over()
        except BaseException:
            self._give_back()
            raise
        share_hooks(optimizer, self)
        make_inert(optimizer, self)
        optimizer.state = self._shown
        self._watch(models)
        self._built = True

    # ------------------------------------------------------------------ the step

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's loss, if any.

        When it returns, parameters are ready for the current stream.

        Raises:
            LaneError: this or an earlier update failed; only a load makes the optimizer usable.
            StateSchemaError, UnsupportedParameterError: refused, nothing was updated.
        """
        self._check_usable()
        self._gateway.current_stream()  # refuses a graph capture before anything is touched
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        began = time.perf_counter()
        work = self._collect()
        with self._failing("step()"):
            start = self._gateway.current_stream().record()
            for segment in self._segments:
                segment.run(work, start)
            step_idle_groups(self._inner, work.snapshot)
            self._write_back(work.snapshot)
        self._steps += 1
        self._loaded_since_step = False
        # A scheduler built on the wrapped optimizer checks there that a step came first.
        self._inner.__dict__["_opt_called"] = True
        self._step_ms = (time.perf_counter() - began) * 1e3
        return loss

    def _collect(self) -> Work:
        """Gradients and a snapshot; whatever can be refused is refused here."""
        if late := [m for m in self._inventory.trainable() if m[0] not in self._reserved]:
            self._extend(late)  # unfrozen after wrapping
        self._inventory.check_schemas(self._records)
        gradients: list[Tensor | None] = []
        for record, address in zip(self._records, self._addresses, strict=True):
            gradient = shards.gradient_shard(record.parameter, record.fqn)
            gradients.append(None if gradient is None else gradient.view(-1))
            if gradient is not None and shards.address(record.parameter) != address:
                raise StateSchemaError(
                    f"shard of {record.fqn}",
                    reason="its memory was replaced after wrapping, and updates are in place",
                    remedy="wrap the optimizer after the model has been moved or re-sharded",
                )
        host = any(segment.host is not None for segment in self._segments)
        return Work(gradients, Snapshot.take(self._inner, self.param_groups, host=host))

    def _write_back(self, snapshot: Snapshot) -> None:
        """What a class of the user's own changed in its groups and attributes, once."""
        for index, changed in snapshot.changed_groups.items():
            self.param_groups[index].update(changed)
        self._inner.__dict__.update(snapshot.changed_attributes or {})

    # ------------------------------------------------------------------ torch.optim.Optimizer

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        """Live state per parameter, after all transfers: tensors over host or device memory."""
        if self._built:
            self.synchronize()
            for record in self._records:
                for kind in record.schema.role("number"):
                    self._shown[record.parameter][kind.name] = record.pieces[0].state[kind.name]
        return self._shown

    @state.setter
    def state(self, value: object) -> None:
        if self._built:
            raise ConfigError(
                "assignment to optimizer.state",
                reason="state lives in memory that was reserved at construction",
                remedy="use load_state_dict(), or write into the tensors in place",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; its state is reserved at once."""
        if self._built:
            self._check_usable()
        super().add_param_group(param_group)
        if not self._built:
            return
        group = len(self.param_groups) - 1
        try:
            self._extend([m for m in self._inventory.trainable() if m[1] == group])
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's: integer ids and live tensors, which the plain optimizer accepts.

        Parameters with bf16 or fp16 shards and an fp32 master have one more entry,
        ``master_remainder`` (int16) or ``master`` (fp32), which plain optimizers ignore.
        """
        self._check_usable()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a state dict into the reserved memory, in place; dtypes and devices stay.

        Accepts integer ids or FQN strings, of this class or of the plain optimizer. Parameters
        are matched by position, as in torch. Load the model's weights first.

        Raises:
            StateDictError: groups, keys, shapes or placements do not fit; nothing was written.
        """
        self._check_usable(failed_ok=True)
        loaded: Any = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, loaded)
            loaded = loaded if replaced is None else replaced
        ids = loading.match_ids(self.param_groups, loaded)
        entries = [loaded["state"].get(ids[r.parameter], {}).items() for r in self._records]
        # Where a flattened checkpoint lacks an entry, torch's unflattening puts an empty dict.
        values = [{n: v for n, v in found if not isinstance(v, dict)} for found in entries]
        saved = loaded["param_groups"]
        groups = loading.checked_groups(self.param_groups, saved, self._inventory, self._records)
        for record, found in zip(self._records, values, strict=True):
            state_io.check(record, found)
        self._drain_quietly()
        self._failure = None
        with self._failing("load_state_dict()"), torch.no_grad():
            for group, loaded_group in zip(self.param_groups, groups, strict=True):
                group.update(loaded_group)
            for record, found in zip(self._records, values, strict=True):
                state_io.write(record, found)
            self._load_natives(loaded["state"], ids)
            self._trust_shards()
        self._loaded_since_step = True
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_natives(self, saved: Mapping[Any, Any], ids: Mapping[Tensor, Any]) -> None:
        """State that has no record: of native parameters, and of frozen ones."""
        recorded = {record.parameter for record in self._records}
        for parameter, saved_id in ids.items():
            found = saved.get(saved_id, {})
            if parameter in recorded or not (found or parameter in self._shown):
                continue
            fresh = {n: loading.native_value(parameter, n, v) for n, v in found.items()}
            self._shown[parameter].clear()
            self._shown[parameter].update(fresh)

    # ------------------------------------------------------------------ the wrapper's own

    def synchronize(self) -> None:
        """Block until parameters and state are final and host memory may be read."""
        self._check_usable()
        with self._failing("synchronize()"):
            self._drain()

    def resync(self) -> None:
        """Set every master equal to its weight, after writing into parameters by hand.

        Not needed for loads into the module given as ``model=``, and host-lane writes are
        noticed by value; without it bf16 masters are at most half a bf16 ulp off.
        """
        self.synchronize()
        with torch.no_grad():
            for record in self._records:
                state_io.write_master(record, {})
            self._trust_shards()

    def statistics(self) -> Statistics:
        """What is held where, and what the last step did."""
        lanes: dict[str, int] = {}
        device_bytes = 0
        for record in self._records:
            lanes[record.lane] = lanes.get(record.lane, 0) + 1
            device_bytes += record.entry.state_bytes if record.lane == "resident" else 0
        for segment in self._segments:
            if segment.native is not None:
                lanes["native"] = lanes.get("native", 0) + len(segment.native.parameters)
                device_bytes += segment.native.state_bytes()
        arenas = [a for segment in self._segments for a in segment.arena_statistics() if a.n_bytes]
        return Statistics(
            steps=self._steps,
            parameters=lanes,
            device_state_bytes=device_bytes,
            host_state_bytes=sum(s.payload_bytes for s in self._segments),
            host_arena_bytes=sum(a.n_bytes for a in arenas),
            pinned=bool(arenas) and all(a.pinned for a in arenas),
            pin_seconds=sum(a.touch_seconds + a.pin_seconds for a in arenas),
            staging_bytes=sum(s.staging_bytes for s in self._segments),
            buckets=sum(s.bucket_count for s in self._segments),
            moved_bytes=sum(s.moved_bytes for s in self._segments),
            step_ms=self._step_ms,
        )

    def close(self) -> None:
        """Finish all work and give host memory, slots and the thread back. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._drain_quietly()
        self._closed, self._failure = True, None  # its traceback holds views of the memory
        self._shown.clear()
        self._give_back()

    def __deepcopy__(self, memo: object) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise ConfigError(
            f"copy or pickle of {type(self).__name__}",
            reason="its state is memory of this process",
            remedy="save state_dict() and load it into a new wrapper",
        )

    # ------------------------------------------------------------------ building and failing

    def _extend(self, added: list[Member]) -> None:
        """Reserve state for members; on error everything is as before."""
        records, natives = self._inventory.plan(added, first=not self._segments)
        frozen = {m[0]: self._shown[m[0]] for m in added if self._shown.get(m[0])}
        for record in records:
            state_io.check(record, frozen.get(record.parameter, {}))
        everything = [*self._records, *records]
        for index, record in enumerate(everything):
            record.index = index
        rank0 = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        with torch.no_grad():
            segment = Segment(
                self._inner,
                everything,
                records,
                natives,
                self._config,
                self._gateway,
                show_progress=rank0,
            )
        weakref.finalize(self, segment.close)
        self._segments.append(segment)
        self._records = everything
        self._addresses += [shards.address(record.parameter) for record in records]
        self._reserved.update(parameter for parameter, _ in added)
        for record in records:
            self._shown[record.parameter] = state_io.expose(record)
            if found := frozen.get(record.parameter):  # trained, then frozen, now trained again
                with torch.no_grad():
                    state_io.write(record, found)
        for parameter, _ in natives:
            self._shown[parameter] = segment.native.state[parameter]  # type: ignore[union-attr]
            self._shown[parameter].update(frozen.get(parameter, {}))

    def _take_over(self) -> None:
        """Move state that the wrapped optimizer already has; it keeps none of it."""
        inner = self._inner
        for record in self._records:
            state_io.check(record, inner.state.get(record.parameter, {}))
        with torch.no_grad():
            for record in self._records:
                if found := inner.state.pop(record.parameter, None):
                    state_io.write(record, found)
            for parameter, found in list(inner.state.items()):
                self._shown[parameter].update(found)
            self._trust_shards()

    def _watch(self, models: Sequence[nn.Module]) -> None:
        """Notice loads into the modules, without keeping the wrapper alive."""
        reference = weakref.ref(self)

        def records() -> Sequence[Record] | None:
            wrapper = reference()
            if wrapper is None or wrapper._closed or wrapper._loaded_since_step:
                return None
            wrapper._drain_quietly()
            return wrapper._records

        loading.unwatch(self, loading.watch_module_loads(models, records))

    def _trust_shards(self) -> None:
        for segment in self._segments:
            segment.trust_shards()

    def _drain(self) -> None:
        for segment in self._segments:
            segment.synchronize()

    def _drain_quietly(self) -> None:
        """Wait for what can still be waited for: a failure was, or will be, reported elsewhere."""
        with contextlib.suppress(Exception):
            self._drain()

    def _give_back(self) -> None:
        for segment in self._segments:
            segment.close()
        for record in self._records:
            record.tensors.clear()
            record.pieces.clear()
        self._segments.clear()
        self._records.clear()
        self._addresses.clear()
        self._reserved.clear()

    def _check_usable(self, *, failed_ok: bool = False) -> None:
        if self._closed:
            raise ClosedError(
                "a closed optimizer", reason="its memory was given back", remedy="wrap again"
            )
        if os.getpid() != self._pid:
            raise ClosedError(
                f"an optimizer of process {self._pid} used in process {os.getpid()}",
                reason="its memory is not inherited by forked processes",
                remedy="step, save and load in the process that built it",
            )
        if self._failure is not None and not failed_ok:
            raise LaneError(
                "an earlier update failed",
                reason=f"some parameters may be one step ahead of others ({self._failure!r})",
                remedy="load a checkpoint (model, then optimizer) or build both anew",
            ) from self._failure

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """From an exception inside on, the optimizer is failed until a load succeeds."""
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._drain_quietly()
            if not isinstance(error, Exception):
                raise  # KeyboardInterrupt and the like stay what they are
            remedy = "load a checkpoint (model, then optimizer) or build both anew"
            reason = str(error) if isinstance(error, OffloadError) else repr(error)
            raise LaneError(f"{what} failed", reason=reason, remedy=remedy) from error
