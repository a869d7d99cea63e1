"""An env that observes the process it lives in. This module imports no torch: neither may the worker that loads it."""

from __future__ import annotations

import os
import random
import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Probe(gym.Env):
    """Observes facts about the process it lives in."""

    observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.draws = (random.random(), np.random.random())
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        return self._obs(0.0 if seed is None else seed), {}

    def step(self, action):
        self.steps += 1
        return self._obs(0.0), 0.0, False, False, {}

    def _obs(self, seed):
        threads = float(os.environ["OMP_NUM_THREADS"])
        return np.array([os.getpid(), "torch" in sys.modules, threads, seed, *self.draws, self.steps, 0], np.float64)
