"""The log of one turn under several readers, and how long and how much of ended turns is remembered."""

import asyncio

import pytest
from tests.server.fakes import Clock

from segue_model.sampling import TokenLogprob
from segue_server.cache.segments import Tier
from segue_server.errors import PositionBeyondEnd, QueueTimeout
from segue_server.events import Event, Failed, Finished, Heartbeat, Started, Tokens
from segue_server.recent import RecentTurns
from segue_server.requests import BusyPolicy, FinishReason, OutputOptions, SessionSettings
from segue_server.sessions import ActiveTurn, Claim, Session
from segue_server.stream import TurnStream

STARTED = Started("r", "s", 0, 3, 3, Tier.DEVICE, 1)
FINISHED = Finished(FinishReason.EOS, 9)


def make(*, max_backlog: int = 256, heartbeat_interval: float = 0.0) -> tuple[TurnStream, list[None]]:
    """A stream, and a list that grows with each call of on_room."""
    rooms: list[None] = []
    output = OutputOptions(heartbeat_interval=heartbeat_interval)
    return (
        TurnStream(output, on_event=lambda e: e, on_room=lambda: rooms.append(None), max_backlog=max_backlog),
        rooms,
    )


def token(number: int, logprobs: int = 0) -> Tokens:
    top = tuple((n, -1.0) for n in range(logprobs))
    return Tokens(10 + number, (number,), "x", (TokenLogprob(number, -1.0, top),) if logprobs else ())


async def test_silence_is_numbered_once_for_all_readers() -> None:
    """Each of three readers waits for the heartbeat, and one is made."""
    stream, _ = make(heartbeat_interval=0.01)
    stream.deliver(STARTED)
    readers = [stream.read(1) for _ in range(3)]
    beats = await asyncio.gather(*(anext(reader) for reader in readers))
    assert all(beat is beats[0][1] for _, beat in beats)
    assert isinstance(beats[0][1], Heartbeat)
    assert [number for number, _ in beats] == [2, 2, 2]
    late = [item async for item in _until_silence(stream.read())]
    assert late[:2] == [(1, STARTED), beats[0]]


async def _until_silence(reader):  # type: ignore[no-untyped-def]
    while True:
        try:
            yield await asyncio.wait_for(anext(reader), 0.001)
        except TimeoutError:
            return


async def test_the_foremost_reader_decides_about_the_pause() -> None:
    """A reader whose connection is dead does not hold up the one that took its place."""
    stream, rooms = make(max_backlog=4)
    stream.read()  # never taken from
    for n in range(4):
        stream.deliver(token(n))
    assert stream.full
    living = stream.read(2)
    assert not stream.full
    assert len(rooms) == 1, "the engine is told when a reader comes who is not behind"
    assert [(await anext(living))[0] for _ in range(2)] == [3, 4]
    stream.deliver(token(4))
    assert not stream.full
    living.close()
    assert stream.full, "only the dead one is left"
    living.close()


async def test_without_a_reader_there_is_no_pause_and_a_new_one_makes_up_for_it() -> None:
    stream, rooms = make(max_backlog=4)
    for n in range(10):
        stream.deliver(token(n))
    assert not stream.full
    reader = stream.read()
    assert stream.full
    for n in range(7):
        assert await anext(reader) == (n + 1, token(n))
    assert not stream.full
    assert len(rooms) == 1


@pytest.mark.parametrize("end", [FINISHED, Failed(QueueTimeout("too long"), 0)], ids=["finished", "failed"])
async def test_what_is_after_the_end(end: Event) -> None:
    """A failure is no event: it has no number, and everybody gets it."""
    stream, _ = make()
    stream.deliver(STARTED)
    stream.deliver(end)
    last = 2 if isinstance(end, Finished) else 1
    with pytest.raises(PositionBeyondEnd, match=f"has {last} events so far, not {last + 1}") as error:
        stream.read(last + 1)
    assert error.value.metadata == {"lastSequence": str(last)}
    if isinstance(end, Finished):
        assert [item async for item in stream.read(2)] == []
        return
    for after in (0, 1):
        with pytest.raises(QueueTimeout):
            [item async for item in stream.read(after)]


def turn(name: str, events: list[Event], session: Session | None = None) -> ActiveTurn:
    claim = Claim(
        request_id=name,
        caller="",
        content=b"",
        output=OutputOptions(),
        policy=BusyPolicy.REJECT,
        patience=0.0,
        detach_grace=0.0,
    )
    result = ActiveTurn(claim, session or Session("s", SessionSettings()))
    result.stream = TurnStream(OutputOptions(), on_event=lambda e: e, on_room=lambda: None)
    for event in events:
        result.stream.deliver(event)
    return result


async def test_a_turn_is_remembered_for_ten_minutes() -> None:
    clock = Clock()
    recent = RecentTurns(clock=clock)
    first, second = turn("a", [FINISHED]), turn("b", [FINISHED])
    recent.add(first)
    clock.now += 300
    recent.add(second)
    clock.now += 299
    assert (recent.find("a"), recent.find("b"), recent.find("c")) == (first, second, None)
    clock.now += 2
    assert (recent.find("a"), recent.find("b")) == (None, second)
    clock.now += 600
    assert recent.find("b") is None
    assert len(recent) == 0


async def test_number_and_memory_of_what_is_remembered_are_bounded() -> None:
    """Logprobs weigh most: 5 tokens with 20 alternatives each take more room than 40 without."""
    few = RecentTurns(max_turns=3)
    for n in range(10):
        few.add(turn(str(n), [FINISHED]))
    assert [n for n in range(10) if few.find(str(n))] == [7, 8, 9]

    heavy = turn("heavy", [*(token(n, logprobs=20) for n in range(5)), FINISHED])
    light = turn("light", [*map(token, range(40)), FINISHED])
    assert heavy.stream.size > light.stream.size > 40 * 200
    small = RecentTurns(max_bytes=heavy.stream.size + light.stream.size)
    small.add(heavy)
    small.add(light)
    assert small.find("heavy")
    small.add(turn("more", [FINISHED]))
    assert (small.find("heavy"), small.find("light")) == (None, light)
    small.add(turn("too much", [token(n, logprobs=20) for n in range(50)]))
    assert len(small) == 0, "what never fits is not kept either"


async def test_what_a_session_said_can_be_forgotten() -> None:
    recent = RecentTurns()
    session, other = Session("s", SessionSettings()), Session("s", SessionSettings())
    for name, owner in (("a", session), ("b", other), ("c", session)):
        recent.add(turn(name, [FINISHED], owner))
    recent.forget(session)
    assert [name for name in "abc" if recent.find(name)] == ["b"]
