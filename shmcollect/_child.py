"""The first code of every child process: ``python -c "...; from shmcollect._child import main; main(...)"``.

It never imports the caller's ``__main__``, so scripts need no guard, and stdin scripts and notebooks work.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from shmcollect import _native
from shmcollect.control import CallerGoneError, ChildSession


def main(title: str, entry: str, control_fd: int, payload_fd: int, parent_pidfd: int) -> None:
    """Runs one role.

    Args:
        title: What process listings show.
        entry: ``"module:function"``, called as ``function(session, payload)``.
        control_fd: The child's end of the control connection.
        payload_fd: A file with the cloudpickled payload.
        parent_pidfd: A pidfd of the caller: when that process ends, so does this one.
    """
    # Ctrl-C goes to the whole terminal group; what it means is the caller's decision. A handler rather than SIG_IGN,
    # because programs that envs start would inherit that. The caller blocked the signal until this line.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _native.watch_parent(parent_pidfd)
    Path("/proc/self/comm").write_text(title[:15])
    for fd in (control_fd, payload_fd, parent_pidfd):
        os.set_inheritable(fd, False)  # programs that envs start have no part in this
    pid = os.getpid()
    session = ChildSession(Connection(control_fd))
    try:
        with open(payload_fd, "rb") as file:
            payload = pickle.load(file)
        module, _, function = entry.partition(":")
        getattr(importlib.import_module(module), function)(session, payload)
        if os.getpid() == pid:
            session.done()
    except CallerGoneError:
        pass
    except BaseException as error:
        if os.getpid() != pid:  # forked by an env: it ends, and that is all
            _flush()
            os._exit(_exit_code(error))
        session.fail(error)
        _flush()
        os._exit(1)  # threads and exit handlers of a broken env must not delay the news


def _exit_code(error: BaseException) -> int:
    """What a process that ends with this exception would exit with."""
    cause = error.__cause__ or error
    if not isinstance(cause, SystemExit):
        return 1
    return cause.code if isinstance(cause.code, int) else int(cause.code is not None)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
