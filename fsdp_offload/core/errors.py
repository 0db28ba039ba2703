"""All errors that the package raises on purpose, in one tree.

    OffloadError
    ├── ConfigError                  an argument is wrong            (also a ValueError)
    │   ├── UnsupportedOptimizerError    this optimizer cannot be offloaded
    │   └── UnsupportedParameterError    a parameter or gradient cannot be
    ├── UnsupportedTorchError        torch's FSDP2 lacks a name       (also a RuntimeError)
    ├── DeviceError                  no accelerator, or several      (also a RuntimeError)
    ├── DeviceMemoryError            device memory is short          (also a RuntimeError)
    ├── AwayError                    used while it is offloaded      (also a RuntimeError)
    ├── BusyError                    used inside its own step()      (also a RuntimeError)
    ├── HostMemoryError              host memory is short            (also a MemoryError)
    ├── PinningError                 the driver refused to pin       (also a RuntimeError)
    ├── StateDictError               a state dict does not fit       (also a ValueError)
    ├── StateSchemaError             the optimizer changed its state (also a RuntimeError)
    ├── SpentGradientError           a gradient was consumed already (also a RuntimeError)
    ├── UnspentGradientError         a gradient would be lost        (also a RuntimeError)
    ├── NonFiniteGradientError       the norm is NaN or infinite     (also a RuntimeError)
    ├── LaneError                    an update failed midway         (also a RuntimeError)
    ├── CheckpointError              saving or loading failed        (also a RuntimeError)
    │   └── CheckpointCorruptError       a file is missing, cut short or changed
    ├── ActivationError              saved activations would be wrong (a RuntimeError)
    │   └── StashOverflowError           pages ran out, or rows went beyond the capacity
    └── ClosedError                  used after ``close()``          (also a RuntimeError)

Each message has three parts: the value, the reason and the remedy.
"""

from __future__ import annotations

import os
from functools import partial


class OffloadError(Exception):
    """Base of all errors of this package.

    Args:
        what: the thing that is wrong, with its value.
        reason: why it is wrong.
        remedy: what the caller can do about it.
    """

    def __init__(self, what: str, *, reason: str = "", remedy: str = "") -> None:
        self.what, self.reason, self.remedy = what, reason, remedy
        text = what
        if reason:
            text += f": {reason}"
        if remedy:
            text += f". Remedy: {remedy}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.what, reason=self.reason, remedy=self.remedy), ()


class ConfigError(OffloadError, ValueError):
    """An argument has a value that is not allowed."""


class UnsupportedOptimizerError(ConfigError):
    """The wrapped optimizer cannot be offloaded exactly."""


class UnsupportedParameterError(ConfigError):
    """A parameter, shard or gradient has a form that cannot be updated exactly."""


class UnsupportedTorchError(OffloadError, RuntimeError):
    """This version of torch lacks a private name of FSDP2 that this package uses."""


class DeviceError(OffloadError, RuntimeError):
    """torch cannot use the device here, or parameters are on several devices."""


class DeviceMemoryError(OffloadError, RuntimeError):
    """Not enough device memory for a reload or an update; nothing is lost."""


class AwayError(OffloadError, RuntimeError):
    """A call needs memory that is offloaded; nothing was changed."""


class BusyError(OffloadError, RuntimeError):
    """A signal handler or callback used the optimizer in the middle of one of its calls."""


class HostMemoryError(OffloadError, MemoryError):
    """Not enough host memory."""


class PinningError(OffloadError, RuntimeError):
    """The driver refused to register host memory."""


class StateDictError(OffloadError, ValueError):
    """A state dict does not fit this optimizer; nothing was written."""


class StateSchemaError(OffloadError, RuntimeError):
    """The wrapped optimizer wants state that was not reserved; nothing was updated."""


class SpentGradientError(OffloadError, RuntimeError):
    """The caller used a gradient that the optimizer has already consumed."""


class UnspentGradientError(OffloadError, RuntimeError):
    """A gradient that no step has consumed would be dropped; nothing was dropped."""


class NonFiniteGradientError(OffloadError, RuntimeError):
    """The norm of the gradients is NaN or infinite; nothing was scaled or updated."""


class LaneError(OffloadError, RuntimeError):
    """An update failed; the optimizer is *failed* until a load succeeds."""


class CheckpointError(OffloadError, RuntimeError):
    """A checkpoint could not be written, found or read."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, truncated, or changed after it was written."""


class ActivationError(OffloadError, RuntimeError):
    """A use of saved activations would give wrong gradients."""


class StashOverflowError(ActivationError):
    """Pages ran out, or more rows came than a buffer holds; results are undefined."""


class ClosedError(OffloadError, RuntimeError):
    """The object was closed, or a forked process uses its parent's."""


def check_open(what: str, pid: int, *, is_closed: bool) -> None:
    """Refuse ``what`` if the object is closed, or process ``pid`` built it and this is another.

    Raises:
        ClosedError: the object is closed, or this process is a fork, which does not inherit its
            memory.
    """
    if is_closed:
        raise ClosedError(what, reason="it is closed", remedy="build a new one")
    if os.getpid() != pid:
        raise ClosedError(
            what,
            reason=f"its memory belongs to the parent process, {pid}",
            remedy="use it in the process that built it",
        )


def copy_error(owner: object, remedy: str) -> ConfigError:
    """Build the error for ``__reduce__`` of an object that owns memory."""
    what = f"a copy or a pickle of {type(owner).__name__}"
    return ConfigError(what, reason="it owns memory of this process", remedy=remedy)
