"""What a child says home: reports, warnings, and the record of a failure before anybody sees that the run is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
from gymnasium import spaces
from in_process import small_segment

from shmcollect import control
from shmcollect.control import CallerGoneError, ChildSession, ErrorRecord, Message, receive, send
from shmcollect.errors import RoleFailure, SegmentInUseError
from shmcollect.run_state import ABORTED, RunState


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    caller, child = Pipe()
    with caller, child:
        yield caller, child


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def failing() -> None:
    raise ZeroDivisionError("by zero, of all things")


def cause_of(**details: object) -> RoleFailure:
    try:
        try:
            failing()
        except ZeroDivisionError as error:
            raise RoleFailure(**details) from error
    except RoleFailure as failure:
        return failure


# ---- records


def test_a_record_describes_the_cause_and_where_it_arose() -> None:
    record = ErrorRecord.of(cause_of(env_index=3, step=17, during="step"))
    assert record.details == {"env_index": 3, "step": 17, "during": "step", "type": "ZeroDivisionError"}
    assert record.message == "by zero, of all things"
    assert "in failing" in record.traceback and record.traceback.endswith("ZeroDivisionError: by zero, of all things\n")
    assert "RoleFailure" not in record.traceback


def test_an_error_of_the_role_itself_is_described_too() -> None:
    record = ErrorRecord.of(raised(KeyError("x")))
    assert (record.details, record.message) == ({"type": "KeyError"}, "'x'")
    record = ErrorRecord.of(raised(RoleFailure(during="probe")))
    assert record.details == {"during": "probe", "type": "RoleFailure"}


def test_records_are_ordered_by_time() -> None:
    records = [ErrorRecord.of(ValueError(i)) for i in range(3)]
    assert [record.time_ns for record in records] == sorted(record.time_ns for record in records)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), ExceptionGroup("many", [ValueError(1), KeyError(2)])]
)
def test_any_exception_has_a_record(error: BaseException) -> None:
    record = ErrorRecord.of(raised(error))
    assert record.details["type"] == type(error).__name__ and type(error).__name__ in record.traceback


def test_an_exception_that_cannot_be_printed_has_a_record() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not me")

    record = ErrorRecord.of(raised(UnprintableError()))
    assert record.message == "(its text cannot be made: RuntimeError('not me'))"
    assert "UnprintableError" in record.traceback


def test_an_endless_text_is_shortened_in_the_middle(ends: tuple[Connection, Connection]) -> None:
    caller, child = ends
    text = "first " + "x" * 10**7 + " last"
    record = ErrorRecord.of(raised(ValueError(text)))
    for each in (record.message, record.traceback):
        assert len(each) < 50_000
        assert "first x" in each and each.rstrip().endswith("x last") and "characters left out" in each
    ChildSession(child).warn(text)  # nobody reads it yet
    content = receive(caller).content
    assert len(content) < 50_000 and content.startswith("first x")


def test_a_failing_child_never_blocks_on_a_caller_that_does_not_read(ends: tuple[Connection, Connection]) -> None:
    _, child = ends
    failed = threading.Thread(target=lambda: ChildSession(child).fail(raised(ValueError("x" * 10**7))), daemon=True)
    failed.start()
    failed.join(60)
    assert not failed.is_alive()


# ---- messages


def test_messages_carry_what_plain_pickle_cannot(ends: tuple[Connection, Connection]) -> None:
    caller, child = ends

    class Odd(spaces.Box):
        def __init__(self) -> None:
            super().__init__(-1, 1, (2,))
            self.key = lambda x: x + 1

    send(child, Odd())
    assert receive(caller).key(1) == 2


def test_reports_warnings_and_failures_are_told_apart(ends: tuple[Connection, Connection]) -> None:
    caller, child = ends
    session = ChildSession(child)
    session.report({"a": 1})
    session.warn("careful")
    session.fail(raised(ValueError("broken")))
    assert receive(caller) == Message("report", {"a": 1})
    assert receive(caller) == Message("warning", "careful")
    failed = receive(caller)
    assert failed.kind == "failed" and failed.content.message == "broken"


def test_a_child_hears_what_the_caller_says_and_that_it_has_gone(ends: tuple[Connection, Connection]) -> None:
    caller, child = ends
    session = ChildSession(child)
    send(caller, ("name", 7))
    assert session.receive() == ("name", 7)
    caller.close()
    with pytest.raises(CallerGoneError):
        session.receive()


# ---- a failure aborts the run


def test_the_record_is_sent_before_the_run_is_seen_aborted(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, child = ends
    with small_segment() as segment:
        session = ChildSession(child)
        session.attach(segment.name, segment.run_id, survivable=False)
        order: list[Any] = []
        monkeypatch.setattr(control, "send", lambda _, message: order.append((message.kind, RunState(segment).value)))
        session.fail(raised(ValueError("broken")))
        assert order == [("failed", 0)]
        assert RunState(segment).value == ABORTED


def test_a_failure_that_can_be_survived_ends_the_process_and_not_the_run(ends: tuple[Connection, Connection]) -> None:
    caller, child = ends
    with small_segment() as segment:
        session = ChildSession(child)
        _, state = session.attach(segment.name, segment.run_id, survivable=True)
        keys = {name: bell.prepare() for name, bell in state.bells.items()}
        session.fail(raised(ValueError("broken")))
        assert receive(caller).content.message == "broken"
        assert not state.is_running(), "the roles of this process end"
        assert RunState(segment).is_running(), "those of others do not"
        assert all(bell.wait(keys[name], 0) for name, bell in state.bells.items()), "a thread asleep hears of it"


def test_before_a_child_has_joined_there_is_no_run_to_abort(ends: tuple[Connection, Connection]) -> None:
    caller, child = ends
    session = ChildSession(child)
    assert session.state is None
    session.fail(raised(ValueError("early")))
    assert receive(caller).content.message == "early"


def test_a_child_joins_only_the_run_it_was_started_for(ends: tuple[Connection, Connection]) -> None:
    _, child = ends
    with small_segment() as segment:
        session = ChildSession(child)
        with pytest.raises(SegmentInUseError, match="another run"):
            session.attach(segment.name, segment.run_id + 1, survivable=False)
        assert session.state is None
        joined, _ = session.attach(segment.name, segment.run_id, survivable=False)
        assert session.state is not None and session.state.is_running()
        joined.close()
