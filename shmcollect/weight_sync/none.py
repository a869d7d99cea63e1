"""No weights travel: the policy has none, is fixed, or both sides look at the same tensors."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from shmcollect.errors import WeightsError
from shmcollect.weight_sync.base import Channel, Weights, WeightSyncScheme


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing: `send` is an error, because the receiver would go on with what it has."""

    name = "none"

    def _offer(self, module: nn.Module | None) -> None:
        pass

    def _accept(self, offer: object) -> None:
        pass

    def _connect(self, channel: Channel) -> None:
        pass

    def _reconnect(self, offer: object, channel: Channel) -> None:
        pass

    def _stage(self, weights: Weights) -> NoReturn:
        raise WeightsError(
            "this policy takes no new weights: it is no nn.Module (nor a method of one), or weight_sync is 'none'"
        )

    def _commit(self) -> int:
        return 0

    def _receive(self) -> int:
        return 0
