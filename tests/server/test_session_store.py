from __future__ import annotations

import pytest

from radixkv.server.errors import ApiError
from radixkv.server.sessions import SessionStore


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(max_sessions: int = 10_000) -> tuple[SessionStore, Clock]:
    clock = Clock()
    return SessionStore(max_sessions=max_sessions, idle_s=10.0, clock=clock), clock


def test_idle_session_expires_and_a_used_or_busy_one_does_not() -> None:
    sessions, clock = store()
    idle, used, busy = (sessions.create(()) for _ in range(3))
    busy.begin_turn()
    clock.now = 6.0
    sessions.get(used.id, "")
    clock.now = 11.0
    assert {s.id for s in sessions.list("")} == {used.id, busy.id}
    with pytest.raises(ApiError, match="no session"):
        sessions.get(idle.id, "")


def test_expired_sessions_make_room_at_a_bounded_cost() -> None:
    sessions, clock = store(max_sessions=1000)
    for _ in range(1000):
        sessions.create(())
    clock.now = 11.0
    sessions.create(())
    assert 1000 - len(sessions) >= 30
    assert len(sessions) > 900
    for _ in range(40):
        sessions.list("")
    assert len(sessions) == 1


def test_session_belongs_to_its_tenant() -> None:
    sessions, _ = store()
    session = sessions.create(("a", ""))
    assert sessions.get(session.id, "a") is session
    with pytest.raises(ApiError) as caught:
        sessions.get(session.id, "b")
    assert caught.value.status == 404
    assert sessions.list("b") == []


def test_fork_is_independent_of_its_parent() -> None:
    sessions, _ = store()
    parent = sessions.create(())
    parent.commit_turn([{"role": "user", "content": "a"}], [1, 2], [3], ended_by_token=False)
    child = sessions.fork(parent, at_turn=None, metadata=None)
    child.commit_turn([{"role": "user", "content": "b"}], [1, 2, 3], [4], ended_by_token=True)
    assert (list(parent.token_ids), len(parent.messages)) == ([1, 2, 3], 1)
    assert (list(child.token_ids), len(child.messages)) == ([1, 2, 3, 4], 2)


def test_busy_session_does_not_expire_behind_many_that_do() -> None:
    sessions, clock = store()
    for _ in range(40):
        sessions.create(())
    busy = sessions.create(())
    busy.begin_turn()
    clock.now = 11.0
    assert sessions.get(busy.id, "") is busy


def test_turn_of_a_deleted_session_is_not_committed() -> None:
    sessions, _ = store()
    session = sessions.create(())
    session.begin_turn()
    sessions.delete(session)
    with pytest.raises(ApiError, match="deleted"):
        session.commit_turn([], [1], [2], ended_by_token=False)
    assert list(session.token_ids) == []
