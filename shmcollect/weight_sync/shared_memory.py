"""Weights through the parameter buffer in shared memory: the default between processes."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from shmcollect import _native
from shmcollect.errors import WeightsError
from shmcollect.parameter_buffer import ParameterReader, ParameterWriter
from shmcollect.segment import Segment
from shmcollect.weight_sync.base import Channel, Weights, WeightSyncScheme
from shmcollect.weights_image import Schema, as_array, copy_all, copy_into


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """An image of the weights in a bank of the segment. Every version has the same names, shapes and dtypes.

    The receiver copies an image into memory of its own, makes sure it is whole, and copies it into the live tensors,
    which stay where they are: compiled modules stay valid, tied tensors tied.
    """

    name = "shared_memory"

    def __init__(self) -> None:
        super().__init__()
        self._schema = Schema(())
        self._module = nn.Module()

    @property
    def image_bytes(self) -> int | None:
        """See `WeightSyncScheme.image_bytes`."""
        return self._schema.size_bytes

    def _offer(self, module: nn.Module | None) -> Schema:
        if module is None:
            raise WeightsError(f"the scheme {self.name!r} needs a module")
        self._module, self._schema = module, Schema.of(module)
        return self._schema

    def _accept(self, offer: Schema) -> None:
        self._schema = offer

    def _connect(self, channel: Channel) -> None:
        segment = channel.segment
        if segment is None or segment.layout.weights is None or segment.layout.image_bytes != self._schema.size_bytes:
            raise WeightsError(
                f"the scheme {self.name!r} needs a segment with images of {self._schema.size_bytes} bytes"
            )
        if self._side == "sender":
            self._connect_sender(segment, segment.layout.weights.schema_hash)
        else:
            self._connect_receiver(segment, segment.layout.weights.schema_hash, channel.reader)

    def _connect_sender(self, segment: Segment, hash_at: int) -> None:
        self._writer = ParameterWriter(segment)
        views = [self._schema.views(torch.from_numpy(image)) for image in self._writer.images]
        self._banks = [[as_array(view) for view in each] for each in views]
        _native.store(segment.buffer, hash_at, self._schema.hash)

    def _connect_receiver(self, segment: Segment, hash_at: int, reader: int) -> None:
        found = _native.load(segment.buffer, hash_at)
        if found != self._schema.hash:
            what = "no sender has connected" if found == 0 else f"its sender has schema {found:#x}"
            raise WeightsError(f"the segment {segment.name!r}: expected schema {self._schema.hash:#x}, but {what}")
        self._reader = ParameterReader(segment, reader)
        self._staging = np.empty(segment.layout.image_bytes, np.uint8)
        self._values = self._schema.views(torch.from_numpy(self._staging))

    def _reconnect(self, offer: Schema, channel: Channel) -> None:
        if offer.hash != self._schema.hash:
            raise WeightsError(f"expected a receiver of schema {self._schema.hash:#x}, got {offer.hash:#x}")

    def shutdown(self) -> None:
        """See `WeightSyncScheme.shutdown`; lets go of the segment's memory."""
        if self._connected and not self._closed:
            if self._side == "sender":
                del self._writer, self._banks
            else:
                del self._reader
        super().shutdown()

    def _stage(self, weights: Weights) -> int:
        tensors = self._schema.match(weights)
        copy_all(self._banks[self._writer.begin()], tensors)
        return self._writer.end()

    def _commit(self) -> int:
        self._writer.commit()
        return self._writer.committed

    def _receive(self) -> int:
        if self._reader.try_read(self._staging):
            self._schema.apply(self._values, self._module, copy_into)
        return self._reader.version
