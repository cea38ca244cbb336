"""Pins of sessions that are taken again, after a restart or a rollback."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from radixkv.errors import RadixKVError
from radixkv.server.sessions import Session

if TYPE_CHECKING:
    from radixkv.server.state import ServerState

__all__ = ["renew_pin"]

logger = logging.getLogger(__name__)


async def renew_pin(state: ServerState, session: Session) -> None:
    """Pin what is cached of a session that was pinned for longer than until now, but isn't.

    Nothing happens where that can't be: an answer must not fail for want of a pin.
    """
    ttl_s = session.pin_ttl_s
    if ttl_s is None or session.deleted or not state.sessions.wants_pin(session):
        return
    try:
        pin = await state.engine.control.pin(
            session.token_ids.tolist(), session.namespace, ttl_s, source=f"session {session.id}"
        )
        if pin is None:
            return
        if session.deleted or session.pin_id is not None:
            await state.engine.control.unpin(pin.pin_id)
        else:
            state.sessions.pinned(session, pin.pin_id, ttl_s)
    except RadixKVError as error:
        logger.warning("the pin of session %s can't be renewed: %s", session.id, error)
