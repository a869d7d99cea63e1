"""Weights over a connection, pickled: for state whose shapes change from version to version."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import threading
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from shmcollect.errors import WeightsError
from shmcollect.weight_sync.base import Channel, Weights, WeightSyncScheme
from shmcollect.weights_image import Schema, as_array, copy_all, copy_into


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """One message per version. Names and dtypes stay, shapes may change.

    Values of the shape a tensor has are copied into it; where the shape differs, the tensor gets new memory. A thread
    of the sender does the writing, because a connection that is full would make it wait; of several versions that wait
    for it, it sends the newest. While connected, nobody else may write on the sender's end or read on the receiver's.
    """

    name = "multiprocess"

    def __init__(self) -> None:
        super().__init__()
        self._schema = Schema(())
        self._module = nn.Module()
        self._version = 0
        self._staged: bytes | None = None
        self._latest: bytes | None = None  # what was committed last, for a receiver that comes later
        self._committed = 0

    def _offer(self, module: nn.Module | None) -> Schema:
        if module is None:
            raise WeightsError(f"the scheme {self.name!r} needs a module")
        self._module, self._schema = module, Schema.of(module)
        return self._schema

    def _accept(self, offer: Schema) -> None:
        self._schema = offer

    def _connect(self, channel: Channel) -> None:
        connection = channel.connection
        if connection is None or not stat.S_ISSOCK(os.fstat(connection.fileno()).st_mode):
            raise WeightsError(f"the scheme {self.name!r} needs a two-way connection, such as an end of Pipe()")
        if self._side == "sender":
            self._mailer = _Mailer(connection)
        else:
            self._connection: Connection | None = connection

    def _reconnect(self, offer: Schema, channel: Channel) -> None:
        if offer.hash != self._schema.hash:
            raise WeightsError(f"expected a receiver of schema {self._schema.hash:#x}, got {offer.hash:#x}")
        self._mailer.close()
        self._connect(channel)
        if self._latest is not None:
            self._mailer.post(self._latest)

    def _stage(self, weights: Weights) -> int:
        tensors = self._schema.match(weights, same_shapes=False)
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        copy_all([as_array(copy) for copy in copies], tensors)
        self._staged = pickle.dumps((self._version + 1, copies), pickle.HIGHEST_PROTOCOL)
        self._version += 1
        return self._version

    def _commit(self) -> int:
        """Hands over what was staged.

        Raises:
            BrokenPipeError: The receiver is gone. Or another error of the connection.
        """
        if self._staged is not None:
            self._latest, self._staged, self._committed = self._staged, None, self._version
            self._mailer.post(self._latest)
        return self._committed

    def _receive(self) -> int:
        newest = None
        while self._connection is not None and self._connection.poll():
            try:
                newest = self._connection.recv_bytes()
            except (EOFError, ConnectionError):
                self._connection = None  # the sender has ended: there will be no more news
        if newest is not None:
            with torch.inference_mode(False):  # what is made under it could never be trained
                version, values = pickle.loads(newest)
                self._schema.apply(values, self._module, _put)
            self._version = version
        return self._version

    def shutdown(self) -> None:
        """See `WeightSyncScheme.shutdown`; the sender's end of the connection can send nothing more after it."""
        if self._side == "sender" and self._connected and not self._closed:
            self._mailer.close()
        super().shutdown()


def _put(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape == value.shape:
        copy_into(tensor, value)
    else:
        tensor.data = value.to(tensor.device)


class _Mailer:
    """A thread that writes messages to a connection; of those that wait, the last one."""

    def __init__(self, connection: Connection) -> None:
        # Its own descriptor: the connection's may be closed, and its number used again, while this thread writes.
        self._connection = Connection(os.dup(connection.fileno()), readable=False)
        self._news = threading.Condition()
        self._message: bytes | None = None
        self._closed = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="shmcollect-weights", daemon=True)
        self._thread.start()

    def post(self, message: bytes) -> None:
        with self._news:
            if self._error is not None:
                raise self._error
            self._message = message
            self._news.notify()

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_WR)  # ends a write to a receiver that does not read; a dead one reads no more
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._message is not None)
                if self._closed:
                    return
                message, self._message = self._message, None
            assert message is not None
            try:
                self._connection.send_bytes(message)
            except OSError as error:
                with self._news:
                    self._error = error
                return
