"""Which rows now? The pure decision when an inference batch goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batcher:
    """When a batch is worth running.

    Args:
        min_batch_size: Rows worth waiting for.
        timeout_s: How long the oldest row may wait for them; None: as long as somebody is coming.
    """

    min_batch_size: int
    timeout_s: float | None

    def goes(self, ready: int, coming: int, oldest_wait_s: float) -> bool:
        """Whether to run now.

        Args:
            ready: Rows that wait for an action.
            coming: Envs that are being stepped and may still join. A hint: wrong, it changes only the batch's size.
            oldest_wait_s: How long the oldest row has waited.
        """
        if ready == 0:
            return False
        return ready >= self.min_batch_size or coming == 0 or self.patience_s(oldest_wait_s) <= 0

    def patience_s(self, oldest_wait_s: float) -> float:
        """How much longer the oldest row may wait; infinite without a timeout."""
        return float("inf") if self.timeout_s is None else self.timeout_s - oldest_wait_s
