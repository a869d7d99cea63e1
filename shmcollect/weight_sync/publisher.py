"""Publisher: the learner's side of the policy's weights. Versions, and from which steps on each of them counts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from shmcollect.policy import module_of
from shmcollect.run_state import RunState
from shmcollect.weight_sync.base import Channel, Weights, WeightSyncScheme


class Publisher:
    """Publishes weights in a run. Any thread may; each version is whole.

    Args:
        scheme: The connected sender.
        state: The words of the run.
        at_once: Whether a version counts as soon as it is published, rather than from the next `commit` on.

    Attributes:
        version: Versions published so far.
    """

    def __init__(self, scheme: WeightSyncScheme, state: RunState, *, at_once: bool) -> None:
        self._scheme = scheme
        self._state = state
        self._at_once = at_once
        self._lock = threading.RLock()
        self.version = 0

    def publish(self, weights: Callable[..., Any] | Weights) -> int:
        """Publishes a module's weights, those of the module a method belongs to, or a dict; returns their version.

        Raises:
            WeightsError: These are not weights of the policy, or it takes none.
            ClosedError: The run is over.
        """
        module = module_of(weights)
        with self._lock:
            self.version = self._scheme.stage(weights if module is None else module)  # type: ignore[arg-type]
            if self._at_once:
                self.commit()
            return self.version

    def close(self) -> None:
        """Ends the sender."""
        with self._lock:
            self._scheme.shutdown()

    def commit(self) -> None:
        """Steps that are granted from now on are run with what was published last."""
        with self._lock:
            with contextlib.suppress(ConnectionError):  # a receiver that is gone is reported by its watcher
                self._scheme.commit()
            self._state.required_version = self.version

    def reconnect(self, offer: Any, channel: Channel) -> None:
        """Goes on with the inference process that takes the place of a dead one.

        Raises:
            WeightsError: Its policy has other weights.
        """
        with self._lock:
            self._scheme.reconnect(offer, channel)
