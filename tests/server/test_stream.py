"""One turn's events on their way to its reader."""

import asyncio

import pytest

from segue_model.sampling import TokenLogprob
from segue_server.cache.segments import Tier
from segue_server.errors import QueueTimeout
from segue_server.events import Event, Failed, Finished, Heartbeat, Queued, Started, Tokens
from segue_server.requests import FinishReason, OutputOptions
from segue_server.stream import TurnStream

STARTED = Started("r", "s", 0, 3, 3, Tier.DEVICE, 1)
FINISHED = Finished(FinishReason.EOS, 9)


class Rooms:
    """Counts the calls of on_room."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def make(*, max_backlog: int = 256, rooms: Rooms | None = None, **options: object) -> TurnStream:
    output = OutputOptions(**options)  # type: ignore[arg-type]
    return TurnStream(output, on_event=lambda e: e, on_room=rooms or Rooms(), max_backlog=max_backlog)


def token(number: int) -> Tokens:
    return Tokens(10 + number, (number,), f"<{number}>", (TokenLogprob(number, -1.0),))


async def collect(stream: TurnStream) -> list[tuple[int, Event]]:
    return [item async for item in stream.read()]


async def test_events_come_in_order_numbered_from_one_and_end_with_finished() -> None:
    stream = make()
    events: list[Event] = [Queued(0), STARTED, token(0), token(1), FINISHED]
    for event in [*events, token(2)]:
        stream.deliver(event)
    assert await collect(stream) == list(enumerate(events, start=1))


async def test_a_failed_turn_raises_after_what_came_before() -> None:
    stream = make()
    stream.deliver(STARTED)
    stream.deliver(Failed(QueueTimeout("too long"), 0))
    reader = stream.read()
    assert await anext(reader) == (1, STARTED)
    with pytest.raises(QueueTimeout, match="too long"):
        await anext(reader)


async def test_tokens_are_joined_up_to_the_number_that_was_asked_for() -> None:
    stream = make(max_tokens_per_event=3, max_event_delay=10.0)
    events: list[Event] = [STARTED, *map(token, range(7)), FINISHED]
    for event in events:
        stream.deliver(event)
    joined = [event for _, event in await collect(stream) if isinstance(event, Tokens)]
    assert [(e.position, e.token_ids, e.text) for e in joined] == [
        (10, (0, 1, 2), "<0><1><2>"),
        (13, (3, 4, 5), "<3><4><5>"),
        (16, (6,), "<6>"),
    ]
    assert [p.token_id for e in joined for p in e.logprobs] == list(range(7))


async def test_joined_tokens_wait_no_longer_than_the_delay() -> None:
    stream = make(max_tokens_per_event=100, max_event_delay=0.02, heartbeat_interval=0)
    stream.deliver(token(0))
    stream.deliver(token(1))
    reader = stream.read()
    began = asyncio.get_running_loop().time()
    assert await anext(reader) == (1, Tokens(10, (0, 1), "<0><1>", token(0).logprobs + token(1).logprobs))
    assert 0.01 < asyncio.get_running_loop().time() - began < 1.0
    stream.deliver(token(2))
    stream.deliver(FINISHED)
    rest = [event async for _, event in reader]
    assert rest == [token(2), FINISHED], "the end does not wait for the delay"


async def test_without_a_delay_nothing_is_held_back() -> None:
    stream = make(max_tokens_per_event=8)
    stream.deliver(token(0))
    assert await anext(stream.read()) == (1, token(0))


async def test_silence_is_filled_with_heartbeats_that_count_as_events() -> None:
    stream = make(heartbeat_interval=0.01)
    stream.deliver(STARTED)
    reader = stream.read()
    assert await anext(reader) == (1, STARTED)
    beats = [await anext(reader) for _ in range(3)]
    assert [number for number, _ in beats] == [2, 3, 4]
    elapsed = [event.elapsed for _, event in beats if isinstance(event, Heartbeat)]
    assert len(elapsed) == 3
    assert elapsed == sorted(elapsed)
    assert elapsed[0] >= 0.009
    stream.deliver(FINISHED)
    assert await anext(reader) == (5, FINISHED)


async def test_no_heartbeat_comes_before_started() -> None:
    stream = make(heartbeat_interval=0.01)
    stream.deliver(Queued(0))
    reader = stream.read()
    assert await anext(reader) == (1, Queued(0))
    asyncio.get_running_loop().call_later(0.05, stream.deliver, STARTED)
    assert await anext(reader) == (2, STARTED)


async def test_no_heartbeats_when_they_are_switched_off() -> None:
    stream = make(heartbeat_interval=0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream.read()), 0.05)


async def test_the_backlog_is_bounded_by_a_pause_and_room_is_told_once_per_event_read() -> None:
    rooms = Rooms()
    stream = make(max_backlog=4, rooms=rooms)
    reader = stream.read()
    for n in range(4):
        assert not stream.full
        stream.deliver(token(n))
    assert stream.full
    assert rooms.calls == 0
    await anext(reader)
    assert not stream.full
    assert rooms.calls == 1
    await anext(reader)
    assert rooms.calls == 1, "it was not full any more"
    stream.deliver(FINISHED)
    assert [event async for _, event in reader][-1] == FINISHED


async def test_on_event_sees_each_event_once_and_may_complete_it() -> None:
    seen: list[Event] = []

    def complete(event: Event) -> Event:
        seen.append(event)
        return event.with_etag("e-1") if isinstance(event, Finished) else event

    stream = TurnStream(OutputOptions(max_tokens_per_event=2), on_event=complete, on_room=Rooms())
    for event in (STARTED, token(0), FINISHED):
        stream.deliver(event)
    assert seen == [STARTED, token(0), FINISHED]
    assert (await collect(stream))[-1] == (3, FINISHED.with_etag("e-1"))


async def test_a_reader_that_is_cancelled_is_not_taken_for_silence() -> None:
    stream = make(heartbeat_interval=10.0)
    task = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
