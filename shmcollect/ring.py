"""The rings of all envs: slots, cursors and array views of them.

One slot's life: the worker publishes an observation (``observed``), inference its action (``acted``), the worker the
outcome with the next observation, the learner reads and gives the slot back (``released``). ``granted`` says how many
steps an env may take.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmcollect._native import ACTED, GRANTED, OBSERVED, RELEASED
from shmcollect._native import Rings as NativeRings
from shmcollect.layout import STEP_FIELDS
from shmcollect.segment import Segment

__all__ = ["ACTED", "GRANTED", "OBSERVED", "RELEASED", "Rings"]


class Rings:
    """Rings of a segment.

    Attributes:
        native: The row loops (see ``_native.pyi``).
        layout: The segment's layout.
        fields: Positions of the fields by kind, e.g. ``fields["obs"]``, one per leaf.
    """

    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self.buffer = segment.buffer
        # Only frombuffer() makes an array that keeps the mapping from being closed under it; ndarray(buffer=) does not.
        self._memory = np.frombuffer(segment.buffer, np.uint8)
        self.layout = layout
        self.num_envs = layout.num_envs
        self.capacity = layout.capacity
        self.fields = {each.kind: layout.indices(each.kind) for each in layout.fields}
        for kind in ("final_obs", "action", "extras"):
            self.fields.setdefault(kind, ())
        self.native = NativeRings(
            segment.buffer,
            layout.num_envs,
            layout.capacity,
            cursors=layout.cursors,
            groups=layout.groups,
            running=np.array(layout.running, dtype=np.int64),
            grant_count=layout.words["grant_count"],
            latencies=np.array(layout.latencies, dtype=np.int64),
            fields=tuple(
                (offset, layout.env_stride(each), each.row_bytes, each.format, each.shape)
                for offset, each in zip(layout.field_offsets, layout.fields, strict=True)
            ),
            step_fields=tuple(layout.index(kind) for kind in STEP_FIELDS),
            leaves=self.fields["obs"],
        )

    def view(self, field: int) -> np.ndarray[Any, Any]:
        """A field as an array [num_envs, capacity, *shape] in place. It keeps the mapping alive."""
        each = self.layout.fields[field]
        inner = np.empty((self.capacity, *each.shape), each.dtype).strides
        return np.ndarray(
            (self.num_envs, self.capacity, *each.shape),
            each.dtype,
            self._memory,
            self.layout.field_offsets[field],
            (self.layout.env_stride(each), *inner),
        )

    def cursors(self, which: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One cursor of all envs, int64[num_envs], a copy."""
        values = np.empty(self.num_envs, np.int64)
        self.native.read_cursors(which, values)
        return values
