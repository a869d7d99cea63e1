"""Where the contenders without shared memory store what they collect."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Rows:
    """T steps of K envs: the fields and dtypes of a slot, preallocated and filled again and again.

    Rows lie time-major, so that the rows of one step are one contiguous block: the cheapest layout for a plain loop.
    `obs` and `episode_start` have a last row more, the one after the last transition.
    """

    def __init__(self, length: int, num_envs: int, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.length = length
        self.obs: NDArray[Any] = np.zeros((length + 1, num_envs, *shape), dtype)
        self.final_obs: NDArray[Any] = np.zeros((length, num_envs, *shape), dtype)
        self.action = np.zeros((length, num_envs), np.int64)
        self.log_prob = np.zeros((length, num_envs), np.float32)
        self.reward = np.zeros((length, num_envs), np.float32)
        self.terminated = np.zeros((length, num_envs), np.bool_)
        self.truncated = np.zeros((length, num_envs), np.bool_)
        self.episode_start = np.zeros((length + 1, num_envs), np.bool_)

    def begin(self) -> None:
        """Makes the last row of one pass the first of the next, and clears the flags."""
        self.obs[0] = self.obs[self.length]
        self.episode_start[0] = self.episode_start[self.length]
        self.episode_start[1:] = False
        self.terminated[:] = False
        self.truncated[:] = False
