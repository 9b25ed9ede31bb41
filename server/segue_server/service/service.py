"""What each call means, put together: descriptions, and the life of the service."""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from segue_server.errors import (
    Draining,
    FieldInvalid,
)
from segue_server.ledger import records
from segue_server.ledger.store import RecoveredSession
from segue_server.recording import ModelChanged, restored
from segue_server.requests import (
    CancelCause,
    ChatTurn,
    FinishReason,
    Input,
    TextInput,
)
from segue_server.service.base import (
    CAPABILITIES,
    REAP_INTERVAL,
    REPLAY_WINDOW,
)
from segue_server.service.transfer_calls import TransferCalls
from segue_server.views import (
    Load,
    ModelInfo,
    ServerInfo,
)
from segue_server.watch import EventType


class Service(TransferCalls):
    """Sessions, turns and descriptions. One per server, on its event loop."""

    def model_info(self) -> ModelInfo:
        return self._model.info()

    def server_info(self) -> ServerInfo:
        return ServerInfo(
            version=self._version,
            build=self._build,
            capabilities=(*CAPABILITIES, *self._engine.engine.figures.lower_tiers),
            limits=self._limits,
            uptime=time.monotonic() - self._began,
        )

    def load(self) -> Load:
        engine, kv = self._engine.engine, self._engine.engine.figures.kv_bytes()
        used = kv.active + kv.pinned
        last_step = engine.stats.last_step_time
        return Load(
            running_requests=self._turns.running,
            queued_requests=self._turns.queued,
            kv_used_bytes=used,
            kv_evictable_bytes=kv.idle + kv.prefix,
            kv_free_bytes=kv.capacity - kv.held,
            sessions=sum(not session.hidden for session in self._sessions),
            generated_tokens_per_second=self._lately.generated_per_second(),
            since_last_step=time.time() - last_step if last_step else time.monotonic() - self._began,
            draining=self.draining,
            prefilled_tokens=engine.stats.prefilled_tokens,
            generated_tokens=engine.stats.generated_tokens,
            time_to_first_token=self._lately.time_to_first_token(),
            inter_token=self._lately.inter_token(),
        )

    def tokenize(self, given: Input, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Ids and pieces of a text, or of a chat as the first turn of a session would append it."""
        checker = self._checker()
        checker.input("input", given)
        checker.done()
        tokenizer = self._model.prompts.need_tokenizer("input")
        if isinstance(given, TextInput):
            ids = tokenizer.encode(given.text, add_special_tokens=add_special_tokens)
        elif isinstance(given, ChatTurn):
            ids = self._model.prompts.encode(given, ledger=(), reply_open=False)
        else:
            raise FieldInvalid.one("input", "must be text or chat")
        return ids, [tokenizer.piece(token) for token in ids]

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        checker = self._checker()
        checker.token_ids("token_ids", ids)
        checker.done()
        return self._model.prompts.need_tokenizer("token_ids").decode(ids, skip_special=skip_special_tokens)

    def session_states(self) -> dict[str, int]:
        """How many sessions are in which state, for the metrics."""
        counts = dict.fromkeys(("idle", "queued", "running", "moving"), 0)
        for session in self._sessions:
            counts[session.state.name.lower()] += not session.hidden
        return counts

    @property
    def waiting_behind(self) -> int:
        """Turns that wait for another one of their own session."""
        return self._waiting_room.waiting

    def restore(self, found: Iterable[RecoveredSession], tombstones: Mapping[str, float]) -> int:
        """Take over the sessions of an earlier process, before the engine's thread starts; returns how many.

        Raises ModelChanged when they were made with another model, SessionLimit when there are too many.
        """
        for recovered in found:
            if recovered.model_fingerprint != self._model.fingerprint:
                raise ModelChanged(recovered.session_id, recovered.model_fingerprint, self._model.fingerprint)
            session = restored(recovered)
            self._sessions.open(session)
            settings = session.settings
            priority, pinned = settings.priority or 0, bool(settings.pinned)
            self._engine.engine.restore(
                session.session_id, recovered.tokens, priority=priority, pinned=pinned, salt=settings.cache_salt
            )
        self._sessions.restore_tombstones(tombstones)
        return len(self._sessions)

    async def reap(self) -> None:
        """Expire idle sessions, for ever; run as a task."""
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            self._lately.look(time.monotonic())
            self._tell_expiring()
            for session in self._sessions.expired(time.time()):
                self._sessions.bury(session)
                self._count_end(session, "expired")
                self._tell(EventType.EXPIRED, session, "TTL")
                self._engine.note(records.SessionExpired(session.session_id, session.expire_time))
                self._engine.post(partial(self._engine.engine.close, session.session_id, "ttl"))
            if self._sessions.forget_tombstones(now := time.time()):
                self._engine.note(records.TombstonesForgotten(now - self._limits.tombstone_ttl))
            horizon = time.monotonic() - REPLAY_WINDOW
            self._created = {i: entry for i, entry in self._created.items() if entry.time >= horizon}
            self._forked = {i: entry for i, entry in self._forked.items() if entry.time >= horizon}
            self._imported = {i: entry for i, entry in self._imported.items() if entry.time >= horizon}

    async def drain(self, grace: float) -> None:
        """Take no new turns, give running ones `grace` seconds, then end them with Finished{DRAINING}.

        Sessions end with the process unless a ledger keeps them; until then they can be read and exported.
        """
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._turns.wait_idle()
        await self._turns.end_all(CancelCause.DRAIN, FinishReason.DRAINING)
        if not self._engine.durable:
            for session in self._sessions:
                self._count_end(session, "drained")
        self.events.close(Draining("the server is shutting down"))

    def _tell_expiring(self) -> None:
        for session in self._sessions.expiring(time.time(), self._limits.expiry_notice):
            session.noticed = session.expire_time
            self._tell(EventType.EXPIRING, session, "TTL")
