"""Child processes: started anywhere, their errors carried home, stopped and reaped whatever they do."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from shmcollect import supervisor
from shmcollect.control import ChildSession
from shmcollect.errors import ChildError, ConfigError, EnvWorkerError, InferenceError
from shmcollect.supervisor import Child, Supervisor, pickled

LONG_S = 60.0
GRACE_S = 30.0

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # children need not import this module


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(supervisor, "_ENTRIES", dict.fromkeys(supervisor._ENTRIES, "child_role:main"))
    made = Supervisor()
    yield made
    for child in made.children:
        child.process.kill()
    made.stop(0)


def start(children: Supervisor, does: Callable[[ChildSession], Any], index: int = 0, kind: Any = "env worker") -> Child:
    envs = range(2 * index, 2 * index + 2) if kind == "env worker" else range(0)
    return children.start(kind, cloudpickle.dumps(does), index=index, envs=envs)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def report_and_wait(content: Any = None) -> Callable[[ChildSession], Any]:
    def does(session: ChildSession) -> None:
        session.report(content)
        session.receive()

    return does


# ---- reports


def test_reports_come_in_the_order_asked_for(children: Supervisor) -> None:
    workers = [start(children, report_and_wait(i), i) for i in range(3)]
    assert children.reports(workers[::-1], LONG_S) == [2, 1, 0]
    assert children.stop(GRACE_S) == []


def test_a_report_that_comes_while_checking_is_not_lost(children: Supervisor) -> None:
    worker = start(children, report_and_wait("here"))
    wait_for(worker.connection.poll)
    children.check()
    assert children.reports([worker], LONG_S) == ["here"]


def test_each_request_for_reports_takes_one_of_each(children: Supervisor) -> None:
    def twice(session: ChildSession) -> None:
        session.report(1)
        session.warn("between")
        session.report(2)
        session.receive()

    worker = start(children, twice)
    assert [children.reports([worker], LONG_S) for _ in range(2)] == [[1], [2]]
    assert children.stop(GRACE_S) == ["env worker 0: between"]


def test_what_the_caller_says_arrives(children: Supervisor) -> None:
    worker = start(children, lambda session: session.report(session.receive() + 1))
    children.send(worker, 41)
    assert children.reports([worker], LONG_S) == [42]


def test_a_child_that_does_not_report_in_time_is_named(children: Supervisor) -> None:
    quick = start(children, report_and_wait(), 0)
    slow = start(children, lambda session: session.receive(), 1)
    children.reports([quick], LONG_S)
    text = rf"env worker 1 \(pid {slow.process.pid}, envs 2\.\.3\) was not ready within startup_timeout=0\.2 s"
    with pytest.raises(EnvWorkerError, match=text):
        children.reports([slow], 0.2)


# ---- failures


def test_an_error_in_a_child_is_raised_here_with_all_that_is_known(children: Supervisor) -> None:
    def fails(session: ChildSession) -> None:
        from shmcollect.errors import RoleFailure

        def step() -> None:
            raise KeyError("no such thing")

        try:
            step()
        except KeyError as error:
            raise RoleFailure(env_index=3, step=17, during="step") from error

    worker = start(children, fails, 1)
    with pytest.raises(EnvWorkerError) as caught:
        children.reports([worker], LONG_S)
    error = caught.value
    assert (error.role, error.pid) == ("env worker 1", worker.process.pid)
    assert error.details == {"env_index": 3, "step": 17, "during": "step", "type": "KeyError"}
    first, _, rest = str(error).partition("\n\n")
    expected = "failed: env 3 raised KeyError in step at step 17: 'no such thing'"
    assert first == f"env worker 1 (pid {worker.process.pid}, envs 2..3) {expected}"
    assert rest.startswith("Traceback in the env worker 1:\n") and "in step" in rest
    assert error.child_traceback in str(error)


def test_an_error_in_inference_is_of_another_type(children: Supervisor) -> None:
    def fails(session: ChildSession) -> None:
        raise ValueError("bad policy")

    inference = start(children, fails, kind="inference server")
    text = rf"^inference server \(pid {inference.process.pid}\) failed: it raised ValueError: bad policy"
    with pytest.raises(InferenceError, match=text):
        children.reports([inference], LONG_S)


def test_of_several_errors_the_first_is_the_cause(children: Supervisor) -> None:
    def fails_when_told(session: ChildSession) -> None:
        session.receive()
        raise ValueError("now")

    workers = [start(children, fails_when_told, i) for i in range(3)]
    for each in (workers[1], workers[2], workers[0]):
        children.send(each, None)
        wait_for(each.has_ended)
    with pytest.raises(EnvWorkerError) as caught:
        children.check()
    assert caught.value.role == "env worker 1"


def test_an_error_counts_more_than_a_child_that_merely_ended(children: Supervisor) -> None:
    def fails(session: ChildSession) -> None:
        raise ValueError("the cause")

    ended, failed = start(children, lambda session: None, 0), start(children, fails, 1)
    wait_for(lambda: ended.has_ended() and failed.has_ended())
    with pytest.raises(EnvWorkerError, match="the cause"):
        children.check()


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda session: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL$"),
        (lambda session: os.kill(os.getpid(), signal.SIGSEGV), r"was killed by SIGSEGV$"),
        (lambda session: os.kill(os.getpid(), signal.SIGRTMIN + 3), r"was killed by signal \d+$"),
        (lambda session: os._exit(0), r"ended unexpectedly with exit code 0$"),
        (lambda session: os._exit(7), r"ended unexpectedly with exit code 7$"),
        (lambda session: sys.exit(5), r"failed: it raised SystemExit: 5"),
    ],
    ids=["SIGKILL", "SIGSEGV", "real-time signal", "exit 0", "exit 7", "sys.exit"],
)
def test_a_child_that_ends_without_being_told_is_an_error(children: Supervisor, end: Any, text: str) -> None:
    def ends(session: ChildSession) -> None:
        import faulthandler

        faulthandler.disable()
        end(session)

    worker = start(children, ends)
    with pytest.raises(EnvWorkerError, match=text):
        children.reports([worker], LONG_S)


def test_telling_a_dead_child_something_raises_what_it_died_of(children: Supervisor) -> None:
    def fails(session: ChildSession) -> None:
        raise ValueError("last words")

    worker = start(children, fails)
    wait_for(worker.has_ended)
    with pytest.raises(EnvWorkerError, match="last words"):
        children.send(worker, "hello?")


def test_all_is_well_while_children_live_and_warn(children: Supervisor) -> None:
    def warns(session: ChildSession) -> None:
        session.warn("a little")
        session.report(None)
        session.receive()

    worker = start(children, warns)
    children.reports([worker], LONG_S)
    for _ in range(3):
        children.check()
    assert children.stop(GRACE_S) == ["env worker 0: a little"]


def test_what_cannot_be_unpickled_there_is_an_error_here(children: Supervisor) -> None:
    worker = children.start("env worker", b"no pickle", envs=range(1))
    with pytest.raises(EnvWorkerError, match=r"failed: it raised UnpicklingError"):
        children.reports([worker], LONG_S)


@pytest.mark.parametrize("content", [threading.Lock(), sys.stderr, lambda: threading.Lock(), (x for x in "ab")])
def test_what_cannot_be_sent_is_refused_here(content: Any) -> None:
    held = content() if callable(content) else content
    with pytest.raises(ConfigError, match=r"the policy cannot be sent to another process: \w+Error: "):
        pickled("the policy", lambda: held)


# ---- stopping


def test_children_that_have_not_joined_hear_that_there_is_no_run(children: Supervisor) -> None:
    workers = [start(children, report_and_wait(), i) for i in range(2)]
    children.reports(workers, LONG_S)
    assert children.stop(GRACE_S) == []
    assert [each.process.returncode for each in workers] == [0, 0]
    assert children.children == [] and children.stop(GRACE_S) == []
    children.check()


def test_inference_that_has_not_joined_is_killed_at_once(children: Supervisor) -> None:
    inference = start(children, lambda session: time.sleep(1000), kind="inference server")
    assert children.stop(1000) == []
    assert inference.process.returncode == -signal.SIGKILL


def stubborn(session: ChildSession) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    session.report(None)
    while True:
        time.sleep(1)


def test_a_child_that_does_not_end_is_killed_and_said_to_be(children: Supervisor) -> None:
    worker, inference = start(children, stubborn, 4), start(children, stubborn, kind="inference server")
    children.reports([worker, inference], LONG_S)
    inference.has_joined = True
    assert children.stop(0.1) == [
        "env worker 4 did not end in time and was killed; close() of its envs may not have run",
        "inference server did not end in time and was killed",
    ]
    assert not psutil.pid_exists(worker.process.pid) and not psutil.pid_exists(inference.process.pid)


def test_a_child_with_much_to_say_is_heard_out(children: Supervisor) -> None:
    def talks(session: ChildSession) -> None:
        session.report(None)
        with contextlib.suppress(Exception):
            session.receive()
        for i in range(100):
            session.warn(f"{i} " + "x" * 20_000)

    worker = start(children, talks)
    children.reports([worker], LONG_S)
    texts = children.stop(GRACE_S)
    assert [int(text.split()[3]) for text in texts] == list(range(100))


def test_waiting_for_a_child_that_has_hung_up_burns_no_processor(children: Supervisor) -> None:
    def hangs_up(session: ChildSession) -> None:
        session.report(None)
        session.connection.close()
        time.sleep(1.5)

    worker = start(children, hangs_up)
    children.reports([worker], LONG_S)
    before = time.process_time()
    assert children.stop(GRACE_S) == []
    assert time.process_time() - before < 0.5


def test_an_interrupted_stop_still_reaps_everyone(children: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    workers = [start(children, stubborn, i) for i in range(2)]
    children.reports(workers, LONG_S)
    monkeypatch.setattr(supervisor, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        children.stop(GRACE_S)
    assert not any(psutil.pid_exists(each.process.pid) for each in workers)


def test_a_fork_is_not_the_owner(children: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert children.is_owner()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        assert not children.is_owner()


# ---- what a child starts with


def look_around(session: ChildSession) -> None:
    session.report(
        {
            "path": sys.path,
            "comm": Path("/proc/self/comm").read_text().strip(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "stdin": os.readlink("/proc/self/fd/0"),
            "main": hasattr(sys.modules["__main__"], "look_around"),
            "torch": "torch" in sys.modules,
            "inheritable": [
                fd for fd in range(3, 100) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)
            ],
            "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            "flags": (sys.flags.dev_mode, sys.warnoptions),
        }
    )
    session.receive()


def test_a_child_finds_its_bearings(children: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path, "/added 'later'", Path("/a/path/object")])
    worker = start(children, look_around, 7)
    (found,) = children.reports([worker], LONG_S)
    assert found["path"] == [each for each in sys.path if isinstance(each, str)]
    assert found["comm"] == "shm-worker-7"
    assert (found["threads"], found["stdin"]) == ("1", "/dev/null")
    assert not found["main"] and not found["torch"]
    assert found["inheritable"] == [] and found["blocked"] == []
    assert found["flags"][1] == sys.warnoptions


def test_the_users_number_of_threads_counts(children: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    worker = start(children, look_around)
    (found,) = children.reports([worker], LONG_S)
    assert found["threads"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_inference_may_use_more_threads(children: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    inference = start(children, look_around, kind="inference server")
    (found,) = children.reports([inference], LONG_S)
    assert (found["threads"], found["comm"]) == (None, "shm-inference")


def test_ctrl_c_is_not_for_children(children: Supervisor) -> None:
    worker = start(children, report_and_wait())
    worker.process.send_signal(signal.SIGINT)  # also one that is still starting
    children.reports([worker], LONG_S)
    worker.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    children.check()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert children.stop(GRACE_S) == []


def test_the_programs_of_an_env_can_be_interrupted_and_hold_nothing_open(children: Supervisor) -> None:
    def starts_a_program(session: ChildSession) -> None:
        code = "import signal, os; print(signal.getsignal(2).__name__, len(os.listdir('/proc/self/fd')))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False)
        session.report(done.stdout.split())

    worker = start(children, starts_a_program)
    assert children.reports([worker], LONG_S) == [["default_int_handler", "4"]]


ORPHAN = """
import os, sys, time
import cloudpickle
from shmcollect import supervisor

def holds_the_lock(session):
    import ctypes
    session.report(None)
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter's lock

supervisor._ENTRIES["env worker"] = "child_role:main"
children = supervisor.Supervisor()
worker = children.start("env worker", cloudpickle.dumps(holds_the_lock), envs=range(1))
children.reports([worker], 60)
print(worker.process.pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_children_end_with_their_parent_even_while_an_env_holds_the_interpreter() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        parent.communicate()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


# ---- where descriptors are scarce, or few are open


@contextlib.contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """Lets the process open so many descriptors and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + number + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(number):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def test_without_descriptors_a_start_fails_whole(children: Supervisor) -> None:
    started = []
    for number in range(14):
        with descriptors_left(number), contextlib.suppress(OSError):
            start(children, report_and_wait())
            started.append(number)
        assert len(children.children) == len(started)
    assert started and started == list(range(started[0], 14)), "with more of them it works"


def test_children_are_stopped_without_descriptors_too(children: Supervisor) -> None:
    worker = start(children, report_and_wait())
    children.reports([worker], LONG_S)
    with descriptors_left(0):
        assert children.stop(GRACE_S) == []


DAEMON = """
import os, sys
import cloudpickle
from shmcollect import supervisor

def does(session):
    print("this goes nowhere", flush=True)
    os.system("echo neither does this")
    session.report(session.receive())

for fd in (0, 1, 2):
    os.close(fd)
supervisor._ENTRIES["env worker"] = "child_role:main"
children = supervisor.Supervisor()
worker = children.start("env worker", cloudpickle.dumps(does), envs=range(1))
children.send(worker, "hello")
reports = children.reports([worker], 60)
with open(sys.argv[1], "w") as file:
    file.write(repr((reports, children.stop(30))))
"""


def test_a_caller_without_standard_streams_can_start_children(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", DAEMON, str(tmp_path / "said")], env=environment, timeout=100)
    assert (tmp_path / "said").read_text() == "(['hello'], [])"


def test_child_errors_are_errors_of_the_package() -> None:
    for kind in (EnvWorkerError, InferenceError):
        error = kind("text", role="env worker 0", pid=3)
        assert isinstance(error, ChildError) and isinstance(error, RuntimeError)
        assert (str(error), error.details, error.child_traceback) == ("text", {}, "")
