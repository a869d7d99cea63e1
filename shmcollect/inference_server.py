"""InferenceServer: runs the policy on whatever envs are ready.

scan the cursors -> new weights, if there are any -> gather rows of ready envs -> policy -> check ->
scatter action, extras, version -> ``acted``
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmcollect.batcher import Batcher
from shmcollect.control import ChildSession
from shmcollect.counters import Counters
from shmcollect.envs import action_tree, observation_tree
from shmcollect.errors import RoleFailure
from shmcollect.policy import ExtrasField, PolicyCaller, build_policy
from shmcollect.ring import ACTED, Rings
from shmcollect.run_state import RunState
from shmcollect.runner import run
from shmcollect.segment import Segment
from shmcollect.weight_sync import Channel, NoWeightSyncScheme, WeightSyncScheme

_WEIGHTS_ON_THE_WAY_S = 0.001  # how soon to look again for weights that rows are waiting for


@dataclass(frozen=True)
class InferencePayload:
    """What the inference process needs to build its policy and to form batches.

    Attributes:
        device: Where the policy runs; None: where its parameters are, else the CPU.
        seed: Seed of torch, applied once the policy has been probed.
        num_threads: Threads of torch, unless OMP_NUM_THREADS says otherwise.
        min_batch_size: Rows worth waiting for.
        max_batch_size: Rows of the largest batch.
        server_timeout: Seconds the oldest row may wait for others; None: as long as others are coming.
        weight_sync: How new weights arrive, if the policy has any.
        restarts: How many inference processes the run has had before.
    """

    device: str | None
    seed: int
    num_threads: int
    min_batch_size: int
    max_batch_size: int
    server_timeout: float | None
    weight_sync: type[WeightSyncScheme] = NoWeightSyncScheme
    restarts: int = 0


@dataclass(frozen=True)
class ProbeReport:
    """What inference tells the caller about its policy.

    Attributes:
        extras: What it returns beside the action.
        weight_sync: The scheme by which it takes new weights: none, if it has no weights.
        offer: What that scheme's sender needs.
    """

    extras: list[ExtrasField]
    weight_sync: type[WeightSyncScheme]
    offer: Any


@dataclass(frozen=True)
class InferenceJoin:
    """What inference needs to join the run once its segment exists.

    Attributes:
        name: The run's name.
        run_id: The run's id.
        survivable: Whether the run goes on when inference fails.
    """

    name: str
    run_id: int
    survivable: bool


def main(session: ChildSession, content: tuple[bytes, InferencePayload]) -> None:
    """The life of the inference process.

    Args:
        session: The connection to the caller.
        content: The cloudpickled pair of policy and policy_factory, one of them None; and all else.
    """
    pickled, payload = content
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(payload.num_threads)
    seed_globals(payload.seed)
    observation_space, action_space = session.receive()
    try:
        policy, policy_factory = pickle.loads(pickled)
        policy = build_policy(policy, policy_factory, observation_space, action_space)
        obs, action = observation_tree(observation_space), action_tree(action_space)
        caller = PolicyCaller(policy, obs, action, payload.device)
        with torch.inference_mode():
            extras = caller.probe()
        kind = NoWeightSyncScheme if caller.module is None else payload.weight_sync
        weights = kind()
        offer = weights.init_on_receiver(caller.module)
    except BaseException as error:
        raise RoleFailure(during="probe") from error
    session.report(ProbeReport(extras, kind, offer))
    join: InferenceJoin = session.receive()
    segment, state = session.attach(join.name, join.run_id, survivable=join.survivable)
    weights.connect(Channel(segment, session.connection))
    seed_globals(payload.seed)  # whatever building and probing drew, the run starts from the seed
    server = InferenceServer(caller, segment, payload, state, weights)
    gc.freeze()  # torch alone is some hundred thousand objects
    session.report("joined")
    server.run()


def seed_globals(seed: int) -> None:
    """Seeds torch and the generators a policy may use beside it."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class InferenceServer:
    """Serves actions; see the module.

    Args:
        caller: The policy.
        segment: The run's segment, mapped for writing.
        payload: How batches are formed.
        state: The state of the run as this process sees it.
        weights: The receiver of new weights, connected; None for a policy that takes none.
    """

    def __init__(
        self,
        caller: PolicyCaller,
        segment: Segment,
        payload: InferencePayload,
        state: RunState,
        weights: WeightSyncScheme | None = None,
    ) -> None:
        self._caller = caller
        self._weights = weights
        self._state = state
        self.counters = Counters(segment, "inference")
        self.counters.values["restarts"] = payload.restarts
        self._rings = Rings(segment)
        self._native = self._rings.native
        self._worker_bells = [self._state.bells[f"worker {w}"] for w in range(segment.layout.num_workers)]
        self._batcher = Batcher(payload.min_batch_size, payload.server_timeout)
        self._max_batch_size = limit = payload.max_batch_size
        self._envs = np.empty(limit, np.int64)
        self._sequences = np.empty(limit, np.int64)
        self._policy_versions = np.zeros(limit, np.int64)
        layout, fields = segment.layout, self._rings.fields
        self._obs_fields = fields["obs"]
        self._answer_fields = (*fields["action"], *fields["extras"], layout.index("policy_version"))
        leaves = (layout.fields[i] for i in self._obs_fields)
        self._staging = [np.empty((limit, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._inputs: dict[int, tuple[list[np.ndarray[Any, Any]], Any]] = {}
        self._next_env = 0
        self._patience_s = float("inf")

    def run(self) -> None:
        """Works until the run ends."""
        self._state.ring_all()  # an earlier process may have died between answering and telling
        with torch.inference_mode():
            run(self, self._state.bells["inference"], self._state)

    def do_work(self) -> int:
        """Runs the policy once, if a batch is due; returns its rows."""
        pauses = self._state.pause_count
        if pauses % 2:
            if self._state.pause_acknowledged != pauses:
                self._state.pause_acknowledged = pauses
                self._state.bells["learner"].notify()
            self._patience_s = float("inf")
            return 0
        ready, coming, oldest_ns = self._native.scan(self._next_env, self._max_batch_size, self._envs, self._sequences)
        waited_s = (time.monotonic_ns() - oldest_ns) / 1e9 if ready else 0.0
        if not self._batcher.goes(ready, coming, waited_s):
            self._patience_s = self._batcher.patience_s(waited_s) if ready else float("inf")
            return 0
        if not self._has_weights():
            self._patience_s = _WEIGHTS_ON_THE_WAY_S
            return 0
        self._serve(ready)
        return ready

    def patience_s(self) -> float:
        """How long the oldest waiting row may go on waiting."""
        return self._patience_s

    def _has_weights(self) -> bool:
        """Applies new weights, if there are any, and says whether they are as new as the fixed rows require.

        After the scan: whoever granted these rows had stored what it requires, and sent it, before.
        """
        if self._weights is None:
            return True
        required = self._state.required_version
        try:
            version = self._weights.receive()
        except BaseException as error:
            raise RoleFailure(during="applying weights") from error
        self._policy_versions.fill(version)
        return version >= required

    def _serve(self, n: int) -> None:
        native, envs, sequences = self._native, self._envs, self._sequences
        rows, obs = self._inputs.get(n) or self._make_inputs(n)
        for field, out in zip(self._obs_fields, rows, strict=True):
            native.gather(field, envs, sequences, n, 1, out)
        versions = self._policy_versions[:n]
        try:
            values = self._caller(obs, n)
            if native.scatter(self._answer_fields, envs, sequences, n, (*values, versions)) >= 0:
                exact = self._caller.exact(values, n)
                native.scatter(self._answer_fields, envs, sequences, n, (*exact, versions))
        except BaseException as error:
            raise RoleFailure(during="policy", batch_size=n) from error
        for worker in native.advance(ACTED, envs, sequences, n, 1):
            self._worker_bells[worker].notify()
        self._next_env = (int(envs[n - 1]) + 1) % self._rings.num_envs
        counts = self.counters.values
        counts["batches"] += 1
        counts["rows"] += n

    def _make_inputs(self, n: int) -> tuple[list[np.ndarray[Any, Any]], Any]:
        """The first n rows of the staging memory, and the same as the policy takes them; made once per n."""
        rows = [each[:n] for each in self._staging]
        self._inputs[n] = rows, self._caller.tensors(rows)
        return self._inputs[n]
