"""WeightSyncScheme: how weights get from a sender to a receiver, whatever carries them.

receiver: init_on_receiver(module) -> offer            connect(channel)      receive(), receive(), ...     shutdown()
sender:              init_on_sender(offer)   connect(channel)      send(weights), send(weights), ...   shutdown()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from shmcollect.errors import ClosedError, WeightsError
from shmcollect.segment import Segment

Weights = nn.Module | Mapping[str, Tensor]
Side = Literal["sender", "receiver"]


@dataclass(frozen=True)
class Channel:
    """What the two sides have in common; a scheme uses the part it needs.

    Attributes:
        segment: A segment laid out for the scheme's `WeightSyncScheme.image_bytes`.
        connection: One end of a two-way connection (a socket).
        reader: Which of several receivers on the segment this is.
    """

    segment: Segment | None = None
    connection: Connection | None = None
    reader: int = 0


class WeightSyncScheme(ABC):
    """One side of a scheme. Versions count from 1; 0 stands for the weights the receiver's module began with.

    Each method may be called on its side only, in the order of the module's picture, `WeightsError` otherwise;
    `ClosedError` after `shutdown`. One thread at a time.

    Attributes:
        name: What the scheme is called in the registry.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._side: Side | None = None
        self._connected = False
        self._closed = False

    def init_on_receiver(self, module: nn.Module | None) -> Any:
        """Becomes the receiver of a module's weights.

        Args:
            module: What the weights are applied to; None for a policy without any.

        Returns:
            What the sender's `init_on_sender` wants to have; can be pickled.

        Raises:
            WeightsError: The module's state cannot be received.
        """
        self._begin("receiver")
        return self._offer(module)

    def init_on_sender(self, offer: Any) -> None:
        """Becomes the sender to a receiver that made this offer."""
        self._begin("sender")
        self._accept(offer)

    @property
    def image_bytes(self) -> int | None:
        """Bytes the sender needs for an image of the weights in the segment; None if it needs no segment."""
        return None

    def connect(self, channel: Channel) -> None:
        """Joins the two sides. Returns at once; the sender may be first.

        Raises:
            WeightsError: The channel lacks what the scheme needs, or leads to other weights.
        """
        self._check_open()
        if self._side is None or self._connected:
            raise self._misuse("connect()")
        self._connect(channel)
        self._connected = True

    def reconnect(self, offer: Any, channel: Channel) -> None:
        """Joins the sender to a receiver that takes the place of a dead one; it gets what was committed last.

        Raises:
            WeightsError: The new receiver has other weights than the one before, or the scheme cannot do this.
        """
        self._check("sender", "reconnect()")
        self._reconnect(offer, channel)

    def send(self, weights: Weights) -> int:
        """Sends weights and returns their version. Never waits for the receiver, which gets the newest it finds.

        Raises:
            WeightsError: These are not weights of the module; the version before is still the newest.
        """
        version = self.stage(weights)
        self.commit()
        return version

    def stage(self, weights: Weights) -> int:
        """The first half of `send`: takes the weights as they are now. The receiver gets none of it yet."""
        self._check("sender", "send()")
        return self._stage(weights)

    def commit(self) -> int:
        """The second half: what was staged last is the newest from now on. Returns its version."""
        self._check("sender", "send()")
        return self._commit()

    def receive(self) -> int:
        """Applies the newest weights in place, if there are news, and returns the version the module has now.

        Call it in the thread that runs the module, between two runs.
        """
        self._check("receiver", "receive()")
        return self._receive()

    def shutdown(self) -> None:
        """Ends this side. Does nothing the second time."""
        self._closed = True

    # ---- what a scheme is made of

    @abstractmethod
    def _offer(self, module: nn.Module | None) -> Any: ...

    @abstractmethod
    def _accept(self, offer: Any) -> None: ...

    @abstractmethod
    def _connect(self, channel: Channel) -> None: ...

    def _reconnect(self, offer: Any, channel: Channel) -> None:
        raise WeightsError(f"the scheme {self.name!r} cannot go on with another receiver")

    @abstractmethod
    def _stage(self, weights: Weights) -> int: ...

    @abstractmethod
    def _commit(self) -> int: ...

    @abstractmethod
    def _receive(self) -> int: ...

    # ---- misuse

    def _begin(self, side: Side) -> None:
        self._check_open()
        if self._side is not None:
            raise self._misuse(f"init_on_{side}()")
        self._side = side

    def _check(self, side: Side, call: str) -> None:
        self._check_open()
        if self._side != side or not self._connected:
            raise self._misuse(call)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {self._side or 'unused'} side of the scheme {self.name!r} has been shut down")

    def _misuse(self, call: str) -> WeightsError:
        state = "is new" if self._side is None else f"is a {'connected ' * self._connected}{self._side}"
        return WeightsError(f"{call} on a scheme {self.name!r} that {state}")
