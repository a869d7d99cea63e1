"""Collect reinforcement-learning experience on one machine through shared memory.

Public names are loaded when they are first used: env workers import parts of this package and must not pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmcollect.batch import Batch, Episode, FinalObs
    from shmcollect.collector import AsyncBatchedCollector
    from shmcollect.errors import (
        BusyError,
        ChildError,
        ClosedError,
        ConfigError,
        EnvWorkerError,
        ExhaustedError,
        InferenceError,
        SegmentError,
        ShmcollectError,
        SpecError,
        WeightsError,
    )
    from shmcollect.rollouts import RolloutReader

_HOMES = {
    "AsyncBatchedCollector": "collector",
    "Batch": "batch",
    "BusyError": "errors",
    "ChildError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "EnvWorkerError": "errors",
    "Episode": "batch",
    "ExhaustedError": "errors",
    "FinalObs": "batch",
    "InferenceError": "errors",
    "RolloutReader": "rollouts",
    "SegmentError": "errors",
    "ShmcollectError": "errors",
    "SpecError": "errors",
    "WeightsError": "errors",
}

__version__ = "0.1.0"
__all__ = [
    "AsyncBatchedCollector",
    "Batch",
    "BusyError",
    "ChildError",
    "ClosedError",
    "ConfigError",
    "EnvWorkerError",
    "Episode",
    "ExhaustedError",
    "FinalObs",
    "InferenceError",
    "RolloutReader",
    "SegmentError",
    "ShmcollectError",
    "SpecError",
    "WeightsError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
