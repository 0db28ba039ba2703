"""What a model and its optimizer keep on the device, and what of it leaves."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from .. import shards
from ..moving import Block, Pages, StorageBlock, collect
from .absences import Holder
from .gradients import Gradients
from .optimizers import OptimizerState
from .policies import Policies
from .seats import KINDS, Owned, Seats

AHEAD_BYTES: Final = 2 << 30
"""Of state whose copies begin before all else is looked up: the link takes 40 ms for it."""


class Contents:
    """Storages by kind, and the blocks that move for them: those of one departure, from before it
    until after the return.

    Args:
        models: parameters and buffers, each once.
        optimizer: state that others have to move.
        gradients: of ``models``.
        seats: by kind; closed with this.
        policies: which kinds leave.
        device: what lies elsewhere is left alone.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: OptimizerState,
        gradients: Gradients,
        seats: Mapping[str, Seats],
        policies: Policies,
        device: torch.device,
    ) -> None:
        self._models, self._optimizer, self._gradients = models, optimizer, gradients
        self._seats, self._policies, self._device = seats, policies, device
        self._storages: dict[str, list[StorageBlock]] = {kind: [] for kind in KINDS}
        self._earlier: dict[str, list[StorageBlock]] = {}  # of the last departure
        self.blocks: dict[str, list[Block]] = {kind: [] for kind in KINDS}
        """What moves, by kind."""
        for kind in KINDS:
            seats[kind].on_loss = functools.partial(self._forget, kind)

    def parameters(self) -> dict[str, Tensor]:
        """All of today, by name."""
        return {
            f"{index}.{name}": parameter
            for index, model in enumerate(self._models)
            for name, parameter in model.named_parameters()
        }

    def every_block(self) -> list[Block]:
        """What moves, of all kinds."""
        return [block for kind in KINDS for block in self.blocks[kind]]

    def held(self) -> Iterator[tuple[Holder, Sequence[StorageBlock]]]:
        """Storages that can be read while they are away, and who knows where they are."""
        for kind in ("params", "state"):
            yield self._seats[kind], self._storages[kind]

    # ------------------------------------------------------------------ of one departure

    def forget(self) -> None:
        """What leaves is not known yet. What did so before may be in somebody else's care now."""
        self._earlier = self._storages
        self._storages, self.blocks = {k: [] for k in KINDS}, {k: [] for k in KINDS}

    def forget_state(self) -> None:
        """It is here, and about to be replaced: what it was would be kept until the next time."""
        self._forget("state")

    def _forget(self, kind: str) -> None:
        self._storages[kind], self.blocks[kind] = [], []

    def release_state(self) -> None:
        """It is here, and was replaced, perhaps: give up what it was."""
        self.forget_state()
        used = {
            shards.storage_of(tensor)._cdata
            for _, tensor in self._optimizer.named()
            if tensor.layout is torch.strided
        }
        self._seats["state"].release_unused(used)

    def pages(self) -> list[Pages]:
        """Of all that lies at fixed addresses."""
        return [pages for seats in self._seats.values() for pages in seats.pages()]

    def forget_gradients(self) -> None:
        """They are back, and others may drop them."""
        self._forget("grads")

    def take_ahead(self) -> list[StorageBlock]:
        """Storages of some of the state, whose blocks may leave before :meth:`collect`: to look up
        all that leaves takes up to 50 us per parameter."""
        policies = self._policies
        if (
            policies.state == "keep"
            or policies.params == "keep"
            or policies.grads not in (None, "drop")
        ):
            return []  # a kept storage stays, whoever else looks at it
        known = self._earlier["state"]
        if not known:
            return []
        parameters = {shards.storage_of(p)._cdata for p in self._optimizer.parameters()}
        if any(block.storage._cdata in parameters for block in known):
            return []  # nor does one that has become a parameter's leave with the state
        storages, blocks = self._seats["state"].still(known, self._optimizer.named(), AHEAD_BYTES)
        self._storages["state"], self.blocks["state"] = storages, blocks
        return storages

    def check_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """See :meth:`.Gradients.check`."""
        self._gradients.check(parameters)

    def collect(
        self,
        parameters: Mapping[str, Tensor],
        gone: Sequence[StorageBlock] = (),
        others: Collection[int] = (),
    ) -> None:
        """Look up all that leaves now, each storage once.

        Args:
            parameters: of :meth:`parameters`, now.
            gone: of :meth:`take_ahead`, on its way already.
            others: storages, by identity, that another offloader is bringing back.
        """
        known = {*others, *(block.storage._cdata for block in gone)}
        earlier = {b.storage._cdata: b for found in self._earlier.values() for b in found}
        named = self._named(parameters)
        kept = [
            tensor for kind, pairs in named.items() for _, tensor in pairs if not self._moves(kind)
        ]
        collect([("", tensor) for tensor in kept], self._device, known=known)
        for kind, pairs in named.items():
            found, owned = list[StorageBlock](), list[Owned]()
            if self._moves(kind):
                found = collect(pairs, self._device, known=known, owned=owned, earlier=earlier)
            self._storages[kind], self.blocks[kind] = self._seats[kind].take(
                found, gone if kind == "state" else (), owned
            )
        self._earlier.clear()  # it keeps memory

    def close(self) -> None:
        """Nothing is going to leave any more; all of it is present. Idempotent."""
        for seats in self._seats.values():
            seats.close()
        self.forget()
        self._earlier.clear()

    # ------------------------------------------------------------------ by name

    def _named(self, parameters: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
        params = [(f"params.{name}", tensor) for name, tensor in parameters.items()]
        for index, model in enumerate(self._models):
            params += [
                (f"buffers.{index}.{name}", buffer) for name, buffer in model.named_buffers()
            ]
        return {
            "params": params,
            "grads": self._gradients.named(parameters),
            "state": list(self._optimizer.named()),
        }

    def _moves(self, kind: str) -> bool:
        return bool(getattr(self._policies, kind) != "keep")
