"""State of one parameter for callers: shown, checked and written in place."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import dtensor
from ..core.errors import StateDictError
from ..core.storage import present
from . import codec, moments
from .moments import Moment
from .params import MasterForm, ParamState
from .schema import StateKind

REMAINDER = MasterForm.REMAINDER.value
WHOLE = MasterForm.WHOLE.value
MASTERS = frozenset((REMAINDER, WHOLE))


def expose(param: ParamState) -> dict[str, Any]:
    """Return the live state of a parameter under torch's names, without a copy.

    Like kinds are shaped and placed like the parameter; scalars are 0-dim tensors. A bf16 or fp16
    parameter with an fp32 master adds ``master_remainder`` (bits) or ``master`` (fp32). A moment in
    codes with scales is a meta tensor here: see :func:`show`.
    """
    shape, coded = param.info.local_shape, _coded(param)
    shown = {kind.name: param.slices[0].state[kind.name] for kind in param.schema.kinds}
    like = [kind.name for kind in param.schema.role("like")]
    for name in [*like, *([param.form.value] if param.emits_master else [])]:
        if name in coded:
            view = torch.empty(shape, dtype=torch.float32, device="meta")
        else:
            view = param.tensors[name].view(shape)
        shown[name] = dtensor.like(param.parameter, view)
    return shown


def copied(param: ParamState) -> dict[str, Any]:
    """Copy what :func:`write` needs to restore the state elsewhere; only the master of a parameter
    that never stepped."""
    shown = expose(param)
    show(param, shown)
    if not param.slices[0].stepped:
        shown = {name: shown[name] for name in MASTERS if name in shown}
    single = {kind.name for kind in param.schema.kinds if kind.role != "like"}
    return {
        name: copy.deepcopy(value)
        if name in single
        else dtensor.like(param.parameter, dtensor.local(value).clone())
        for name, value in shown.items()
    }


def _coded(param: ParamState) -> dict[str, Moment]:
    return {moment.name: moment for moment in param.moments if moment.has_scales}


def show(param: ParamState, shown: dict[str, Any]) -> None:
    """Complete the result of :func:`expose` for a reader: add numbers, and replace codes by values.

    The values are fp32 copies, which :func:`adopt_writes` encodes again, exactly.
    """
    for kind in param.schema.role("number"):
        shown[kind.name] = param.slices[0].state[kind.name]
    for moment in _coded(param).values():
        codes = param.tensors[moment.name]
        values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        scales = param.tensors[moment.scale_kind.name]
        moments.unpack(moment, codes, scales, values)
        view = values.view(param.info.local_shape)
        shown[moment.name] = dtensor.like(param.parameter, view)


def check(param: ParamState, values: Mapping[str, Any]) -> None:
    """Refuse values that do not fit, before any write.

    Raises:
        StateDictError: a missing kind, another shape, or another placement.
    """
    check_names(param, values)
    for kind in kinds_in(param, values):
        if kind.role == "like":
            _check_tensor(param, kind.name, values[kind.name])
        elif not _is_number(values[kind.name]):
            raise StateDictError(
                f"state {kind.name!r} of {param.fqn}: {values[kind.name]!r}",
                reason="a single number is expected",
                remedy="load a checkpoint of the same optimizer class",
            )
    for name in MASTERS & values.keys() if param.emits_master else ():
        _check_tensor(param, name, values[name])
        if name == REMAINDER:
            check_remainder(f"{REMAINDER} of {param.fqn}", values[name].dtype)


def check_remainder(what: str, dtype: torch.dtype) -> None:
    """Refuse a remainder that was cast, because its bits are lost.

    Raises:
        StateDictError: the remainder is not bf16.
    """
    if dtype != torch.bfloat16:
        raise StateDictError(
            f"{what} of {dtype}",
            reason="it holds raw bits typed as torch.bfloat16, and a cast destroys them",
            remedy="keep the dtypes of a state dict, or remove this entry: masters then "
            "start from the weights",
        )


def kinds_in(param: ParamState, names: Collection[str]) -> Sequence[StateKind]:
    """Return the parameter's kinds; none if ``names`` has at most a master: the parameter was never
    updated, or its class keeps nothing else under these options."""
    return param.schema.kinds if set(names) - MASTERS else ()


def check_names(param: ParamState, names: Collection[str]) -> None:
    """Refuse a state that lacks an entry; ``names``: its entries.

    Raises:
        StateDictError: a kind is missing.
    """
    if missing := sorted({kind.name for kind in kinds_in(param, names)} - set(names)):
        raise StateDictError(
            f"state of {param.fqn} with keys {sorted(names)}",
            reason=f"{missing} are missing: another optimizer class or other options saved it",
            remedy="load a checkpoint of the same optimizer class and options",
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(value, bool | int | float)


def _check_tensor(param: ParamState, name: str, value: Any) -> None:
    shape = param.info.local_shape
    if not isinstance(value, Tensor):
        raise StateDictError(
            f"state {name!r} of {param.fqn} of type {type(value).__name__}",
            reason="a tensor is expected",
            remedy="load a checkpoint of the same optimizer class",
        )
    found = tuple(dtensor.local(value).shape)
    if found != shape or not dtensor.same_placement(param.parameter, value):
        raise StateDictError(
            f"state {name!r} of {param.fqn} with shard shape {found} of {tuple(value.shape)}",
            reason=f"this rank holds a shard of shape {shape} of {param.info.global_shape}",
            remedy="load through torch.distributed.checkpoint, or give whole tensors and names "
            "of parameters to torch's set_optimizer_state_dict, as docs/checkpoints.md does",
        )
    if value.is_meta and name not in _coded(param):  # expose() returns them as meta tensors
        raise StateDictError(
            f"state {name!r} of {param.fqn} on the meta device",
            reason="it has a shape but no values",
            remedy="load values: torch.load(...) without map_location='meta'",
        )


def resolve_aliases(
    params: Sequence[ParamState], values: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Clone values that alias the state of another entry or parameter (a state dict of live
    tensors), so that no write overwrites a value that a later write needs."""
    own = {_address(tensor) for param in params for tensor in param.tensors.values()} - {0}
    result = []
    for param, given in zip(params, values, strict=True):
        clones = {}
        for name, target in param.tensors.items():
            if isinstance(source := given.get(name), Tensor):
                plain = dtensor.local(source)
                if not _is_same(target, plain) and _address(plain) in own:
                    clones[name] = dtensor.like(param.parameter, plain.clone())
        for kind in param.schema.role("scalar"):
            value = given.get(kind.name)
            if isinstance(value, Tensor) and value is not param.slices[0].state[kind.name]:
                clones[kind.name] = value.clone()
        result.append({**given, **clones} if clones else given)
    return result


def _address(tensor: Tensor) -> int:
    """Return the address of its storage, which no other state tensor shares; 0 if it has none."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _is_same(target: Tensor, source: Tensor) -> bool:
    where = (target.data_ptr(), target.dtype, target.device)
    return source.is_contiguous() and where == (source.data_ptr(), source.dtype, source.device)


def write(param: ParamState, values: Mapping[str, Any]) -> None:
    """Copy checked values into the parameter's state; without values, or with only a master, reset
    it.

    Values may alias the state that they are written to; :func:`resolve_aliases` handles other
    aliases.
    Buffers keep address, dtype and device.
    """
    if not values:
        reset(param)
        return
    _put(param, values)
    if _has_stepped(param, values):
        for sliced in param.slices:
            sliced.stepped = True
    else:
        _initialise(param)  # the class may have made it in a lower precision
    count_updates(param)
    write_master(param, values)


def _put(param: ParamState, values: Mapping[str, Any]) -> None:
    coded = _coded(param)
    for kind in param.schema.kinds:
        if (value := values.get(kind.name)) is None:
            continue
        if kind.role == "like":
            source, target = dtensor.local(value).reshape(-1), param.tensors[kind.name]
            if kind.name in coded:
                _encode(param, coded[kind.name], source)
            elif not _is_same(target, source):  # loads in place end here, too
                target.copy_(source)
            continue
        for sliced in param.slices:
            if kind.role == "number":
                sliced.state[kind.name] = value.item() if isinstance(value, Tensor) else value
            elif not isinstance(value, Tensor):
                sliced.state[kind.name].fill_(value)
            elif sliced.state[kind.name] is not value:
                sliced.state[kind.name].copy_(value.reshape(()))


def _encode(param: ParamState, moment: Moment, values: Tensor) -> None:
    if values.is_meta:  # never shown, so the caller never wrote it
        return
    codes = param.tensors[moment.name]
    source = values.to(codes.device, torch.float32).contiguous()
    moments.pack(moment, source, codes, param.tensors[moment.scale_kind.name], None)


def count_updates(param: ParamState) -> None:
    """Continue the random bits at the written ``step``; without one, restart them."""
    if not param.moments:
        return
    first = param.slices[0].state
    count = int(float(first["step"])) if "step" in first else 0
    for sliced in param.slices:
        sliced.updates = count


def adopt_writes(param: ParamState, shown: dict[str, Any]) -> None:
    """Adopt what the caller wrote into ``shown`` (an earlier :func:`expose`).

    Tensors of the arena are the state itself, but each slice has its own scalars, state that was
    set by hand must not be initialised again, and an object that replaced a tensor gives its
    values. Afterwards ``shown`` has the live tensors again.

    Raises:
        StateDictError: an entry is missing or does not fit; nothing was changed.
    """
    check(param, shown)
    name = param.form.value
    if name in shown and not _is_same(param.tensors[name], dtensor.local(shown[name]).reshape(-1)):
        write_master(param, shown)
    _put(param, shown)
    if not param.slices[0].stepped and _has_stepped(param, shown):
        for sliced in param.slices:
            sliced.stepped = True
    if "step" in shown:
        count_updates(param)
    shown.update(expose(param))


def reset(param: ParamState) -> None:
    """Reset state as at construction: the class initialises it again at the next gradient."""
    _initialise(param)
    write_master(param, {})


def _initialise(param: ParamState) -> None:
    for kind in param.schema.kinds:
        for sliced in param.slices:
            if kind.role == "number":
                sliced.state[kind.name] = 0
            elif kind.role == "scalar":
                sliced.state[kind.name].fill_(kind.initial)
    fill_initial(param)
    for sliced in param.slices:
        sliced.stepped, sliced.updates = param.schema.eager, 0


def fill_initial(param: ParamState, *, only_shown: bool = False) -> None:
    """Fill like kinds with their values before the first step; ``only_shown``: memory is zeroed, so
    skip kinds that show zeros."""
    coded = _coded(param)
    has_step = any(kind.name == "step" for kind in param.schema.kinds)  # else zeros are negative
    for kind in param.schema.role("like"):
        if only_shown and has_step and kind.initial == 0:
            continue
        tensor = param.tensors[kind.name]
        if kind.name in coded:
            values = torch.full(tensor.shape, kind.initial, device=tensor.device)
            _encode(param, coded[kind.name], values)
        else:
            tensor.fill_(kind.initial)


def write_master(param: ParamState, values: Mapping[str, Any]) -> None:
    """Set the master from a saved master, a saved remainder, or (neither) from the shard.

    Reads and writes an offloaded shard in host memory.
    """
    if param.form is MasterForm.SHARD:
        return
    shard, own = _shard_of(param), param.tensors[param.form.value]
    if WHOLE in values:
        saved = dtensor.local(values[WHOLE]).reshape(-1)
        if _is_same(own, saved):
            # torch's partial loads pass on the live master as if loaded: if it does not round to
            # the weight, the weight is newer.
            follow_shard(param)
            return
        master = saved.to(shard.device, param.compute_dtype).contiguous()
        if param.form is MasterForm.WHOLE:
            shard.copy_(master)  # the shard becomes its rounding
            own.copy_(master)
        else:
            remainder = torch.empty_like(shard)
            codec.encode(master, shard, remainder)
            own.copy_(remainder)
    elif param.form is MasterForm.WHOLE:
        own.copy_(shard)
    elif REMAINDER in values:
        own.copy_(dtensor.local(values[REMAINDER]).reshape(-1))
    else:
        own.zero_()


def _shard_of(param: ParamState) -> Tensor:
    return present(dtensor.local(param.parameter)).reshape(-1)


def seeds_master(param: ParamState, values: Mapping[str, Any]) -> bool:
    """Whether loading ``values`` has to take the master from the weight, because none was saved."""
    return bool(values) and param.emits_master and not {REMAINDER, WHOLE} & values.keys()


def follow_shard(param: ParamState) -> None:
    """Adopt shards that the caller wrote: where a whole master does not round to its shard."""
    master = param.tensors[WHOLE]
    codec.reseed_where_changed(_shard_of(param).to(master.device), master)


def reconciled(param: ParamState, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reconcile saved ``values`` with a weight that may be newer: where their whole master does not
    round to the weight, it becomes the weight."""
    if WHOLE not in values or not param.emits_master:
        return values
    shard = _shard_of(param)
    saved = dtensor.local(values[WHOLE]).reshape(-1)
    master = saved.to(shard.device, param.compute_dtype, copy=True)
    codec.reseed_where_changed(shard, master)
    view = master.view(param.info.local_shape)
    return {**values, WHOLE: dtensor.like(param.parameter, view)}


def _has_stepped(param: ParamState, values: Mapping[str, Any]) -> bool:
    """Whether the parameter's state shows any update.

    A fresh optimizer already has its keys, and before the first step the class must initialise the
    state itself (SGD's first momentum ignores dampening). So state counts as never updated if its
    ``step`` is 0 and every other value is as at construction. A value that follows an option, which
    may have changed, only has to be equal in all elements.
    """
    schema = param.schema
    if not schema.kinds or float(values.get("step", 0)) != 0:
        return True
    kinds = [k for k in schema.kinds if k.name != "step"]
    return not all(_is_initial(kind, values.get(kind.name)) for kind in kinds)


def is_fresh(param: ParamState) -> bool:
    """Whether the parameter was never updated, by this optimizer or by the one that saved its
    state."""
    if param.schema.eager:
        return not _has_stepped(param, expose(param))
    return not param.slices[0].stepped


def _is_initial(kind: StateKind, value: Any) -> bool:
    """Whether every element is the initial one, in the value's own precision. Without a step count
    that is a negative zero, which arithmetic almost never leaves in every element, and which other
    code reads as zero."""
    if not isinstance(value, Tensor):
        return value is None or bool(value == kind.initial)
    found = dtensor.local(value)
    if found.device.type == "meta":
        return True  # never shown, so not written
    if kind.option == "lr":
        return not found.numel() or bool((found == found.reshape(-1)[0]).all())
    same = found == kind.initial
    if kind.initial == 0 and math.copysign(1.0, complex(kind.initial).real) < 0:
        same = same & (found.real if found.is_complex() else found).signbit()
    return bool(same.all())
