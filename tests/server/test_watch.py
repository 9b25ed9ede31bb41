"""The log of session events by itself: numbers, places, bounds, ends."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from segue_server.errors import Draining, EventHistoryLost
from segue_server.events import CacheUsage
from segue_server.requests import SessionSettings
from segue_server.views import SessionState, SessionView
from segue_server.watch import EventHub, EventType, SessionEvent


def view(session_id: str = "s-1") -> SessionView:
    return SessionView(
        session_id=session_id,
        display_name="",
        labels={},
        state=SessionState.IDLE,
        position=0,
        etag="e",
        turn_count=0,
        active_request_id="",
        cache=CacheUsage(),
        settings=SessionSettings(),
        create_time=0.0,
        last_used_time=0.0,
        expire_time=0.0,
        model_fingerprint="",
    )


def publish(hub: EventHub, count: int, session_id: str = "s-1") -> None:
    for _ in range(count):
        hub.publish(EventType.TURN_STARTED, view(session_id), "CALLER")


async def take(events: AsyncIterator[SessionEvent], count: int) -> list[int]:
    return [(await anext(events)).sequence for _ in range(count)]


async def test_every_watcher_sees_every_event_once_and_in_order() -> None:
    hub = EventHub()
    watchers = [hub.watch(hub.place(None)) for _ in range(3)]
    readers = [asyncio.ensure_future(take(watcher, 5)) for watcher in watchers]
    for _ in range(5):
        publish(hub, 1)
        await asyncio.sleep(0)
    assert await asyncio.gather(*readers) == [[1, 2, 3, 4, 5]] * 3


async def test_a_watch_goes_on_after_the_last_event_it_has() -> None:
    hub = EventHub()
    publish(hub, 10)
    assert await take(hub.watch(hub.place(0)), 10) == list(range(1, 11))
    assert await take(hub.watch(hub.place(7)), 3) == [8, 9, 10]
    later = hub.watch(hub.place(None))
    publish(hub, 1)
    assert await take(later, 1) == [11]


async def test_what_the_ring_has_lost_is_an_error_that_names_the_oldest() -> None:
    """Before a watch begins and while it lasts; and a number of another server's life is not taken for one of ours."""
    hub = EventHub(capacity=4)
    slow = hub.watch(hub.place(None))
    publish(hub, 4)
    assert await take(slow, 1) == [1]
    publish(hub, 3)  # 4 .. 7 are kept, and the slow watcher has 1
    assert hub.place(3) == 3
    for lost in (slow.__anext__, lambda: asyncio.to_thread(hub.place, 2), lambda: asyncio.to_thread(hub.place, 8)):
        with pytest.raises(EventHistoryLost) as caught:
            await lost()
        assert caught.value.metadata == {"oldestSequence": "4"}
    assert await take(hub.watch(3), 4) == [4, 5, 6, 7]


async def test_slow_watchers_cost_a_number_each() -> None:
    """A thousand watchers that never read keep nothing alive beyond the ring."""
    hub = EventHub(capacity=8)
    watchers = [hub.watch(hub.place(None)) for _ in range(1000)]
    publish(hub, 10_000)
    assert hub.oldest_sequence == 9993
    for watcher in watchers[:3]:
        with pytest.raises(EventHistoryLost):
            await anext(watcher)


async def test_the_watch_of_one_session_ends_with_it() -> None:
    hub = EventHub()
    publish(hub, 2, "other")
    publish(hub, 1, "mine")
    hub.publish(EventType.DELETED, view("mine"), "CALLER")
    publish(hub, 1, "other")
    assert [event.sequence async for event in hub.watch(0, "mine")] == [3, 4]
    assert hub.knows("mine", 3)
    assert not hub.knows("mine", 4)
    assert not hub.knows("nobody", 0)


async def test_closing_ends_every_watch_after_the_events_there_are() -> None:
    hub = EventHub()
    waiting = asyncio.ensure_future(take(hub.watch(0), 3))
    await asyncio.sleep(0)
    publish(hub, 2)
    hub.close(Draining("bye"))
    with pytest.raises(Draining):
        await waiting
    late = hub.watch(0)
    assert await take(late, 2) == [1, 2]
    with pytest.raises(Draining):
        await anext(late)
