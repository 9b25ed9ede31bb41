"""`segue top` without a terminal: rates, order, filter, figures, and the lines above the table."""

import dataclasses

import pytest

from segue.v1 import cache_pb2, model_pb2, session_pb2, types_pb2
from segue.v1.generation_pb2 import Finished
from segue_client.top import panels
from segue_client.top.figures import compact_bytes, latency, rate, shares, shortened, span, sparkline
from segue_client.top.history import History, Rates, rates
from segue_client.top.snapshot import Latency, Load, Server, SessionRow, Snapshot, Tier, TurnRow
from segue_client.top.table import COLUMNS, GAP, Order, cell, columns_for, heading, matching
from segue_client.top.turns import columns_for as turn_columns_for
from segue_client.top.turns import decode_rate


def snapshot(time, *, uptime=100.0, **load):
    return Snapshot(time, Server("host:1", "tiny", "0.1.0", "torch-cpu", uptime, 256, 16), Load(**load), (), ())


def row(session_id="abc", **fields):
    plain = {"state": "idle", "position": 1, "used": 0, "shared": 0, "tier": "device", "idle": 1.0, "ttl": 9.0}
    return SessionRow(session_id, **{**plain, **fields})


# ---------------------------------------------------------------------------------------------------------- rates


def test_rates_are_differences_over_the_time_between_two_snapshots():
    before = snapshot(10.0, generated=100, prefilled=0, inter_token=Latency(count=10, total=1.0))
    after = snapshot(12.0, generated=150, prefilled=900, inter_token=Latency(count=14, total=1.2))
    got = rates(before, after)
    assert (got.generated, got.prefilled) == (25.0, 450.0)
    assert got.inter_token == pytest.approx(0.05)
    assert got.first_token is None, "no turn has begun to answer: there is no mean of nothing"


@pytest.mark.parametrize("after", [snapshot(12.0, uptime=3.0, generated=200), snapshot(12.0, generated=5)])
def test_a_server_that_was_started_anew_has_no_rates_across_the_start(after):
    """Neither negative ones nor the whole count of the new process at once."""
    assert rates(snapshot(10.0, generated=100), after) == Rates()


def test_history_keeps_the_newest_last_and_the_first_snapshot_begins_an_interval():
    history = History()
    assert history.now == Rates()
    for time, generated in ((0.0, 0), (1.0, 10), (2.0, 40)):
        history.add(snapshot(time, generated=generated))
    assert history.generated == [10.0, 30.0]
    assert history.now.generated == 30.0


# ---------------------------------------------------------------------------------------------------- from messages


def test_a_session_that_is_in_use_is_not_idle_and_does_not_expire():
    info = session_pb2.Session(session_id="abc", state=session_pb2.SESSION_STATE_IDLE, position=7)
    info.last_used_time.FromSeconds(1000)
    info.expire_time.FromSeconds(1600)
    idle = SessionRow.of(info, now=1010.0)
    assert (idle.state, idle.idle, idle.ttl) == ("idle", 10.0, 590.0)
    assert SessionRow.of(info, now=990.0).idle == 0.0, "the server's clock is ahead of ours"
    info.active_request_id = "r"
    busy = SessionRow.of(info, now=1010.0)
    assert (busy.idle, busy.ttl) == (None, None)


def test_an_older_server_has_no_latencies_to_tell():
    """Fields it does not know are nothing measured, not zero seconds."""
    load = Load.of(model_pb2.Load(running_requests=2))
    assert load.first_token == Latency()
    assert "0.00" not in panels.rates(snapshot(0.0), History(), 79).plain


def test_tiers_as_the_admin_port_tells_them_and_as_everybody_may_know_them():
    told = cache_pb2.TierStats(tier=types_pb2.CACHE_TIER_HOST, capacity_bytes=100, idle_bytes=60, free_bytes=40)
    tier = Tier.of(told)
    assert (tier.name, tier.held, tier.parts["idle"]) == ("host", 60, 60)
    load = model_pb2.Load(kv_used_bytes=10, kv_evictable_bytes=20, kv_free_bytes=70)
    rough = Tier.rough(load, model_pb2.Limits(kv_budget_bytes=100))
    assert (rough.name, rough.held, dict(rough.parts)) == ("device", 30, {"in use": 10, "evictable": 20, "free": 70})


def test_a_turn_has_its_timings_only_where_the_server_still_knows_them():
    span = session_pb2.TurnSpan(turn=3, start_position=10, generated_start_position=14, end_position=25, request_id="r")
    assert TurnRow.of(span, None) == TurnRow(3, "r", 10, 14, 25, "")
    span.finish_reason = types_pb2.FINISH_REASON_MAX_TOKENS
    finished = Finished()
    finished.timings.decode.FromMilliseconds(2000)
    finished.timings.time_to_first_token.FromMilliseconds(250)
    turn = TurnRow.of(span, finished)
    assert (turn.prompt, turn.generated, turn.reason) == (4, 11, "max_tokens")
    assert decode_rate(turn) == 5.0, "the first token belongs to the prefill"
    texts = [column.placed(column.text(turn)).strip() for column in turn_columns_for(80)]
    assert texts == ["3", "10-25", "4", "11", "max_tokens", "-", "250 ms", "-", "5.0"]


# ------------------------------------------------------------------------------------------------- order and filter


ROWS = [
    row("b", position=5, used=300, idle=None, ttl=None, state="running"),
    row("a", position=9, used=100, idle=60.0, ttl=10.0, name="Front desk"),
    row("c", position=5, used=200, idle=2.0, ttl=99.0, labels={"team": "Blue"}),
]


@pytest.mark.parametrize(
    ("order", "ids"),
    [
        (Order(), "bca"),  # in use first, then those used last
        (Order("id", reverse=False), "abc"),
        (Order("id", reverse=True), "cba"),
        (Order("position", reverse=False), "abc"),  # numbers: the greatest first; equal ones by id
        (Order("position", reverse=True), "bca"),
        (Order("bytes", reverse=False), "bca"),
        (Order("ttl", reverse=True), "acb"),
        (Order("state", reverse=False), "acb"),
    ],
)
def test_sessions_are_sorted_by_a_column_either_way(order, ids):
    assert "".join(each.session_id for each in order.sort(ROWS)) == ids


def test_every_column_can_be_sorted_by_and_the_one_sorted_by_has_an_arrow():
    for column in COLUMNS:
        order = Order("id", reverse=True).by(column.key)
        assert order.sort(ROWS)
        assert heading(column, order).strip()[-1] in "▲▼"
        assert sum(bool(order.arrow(each)) for each in COLUMNS) == 1


def test_sorting_goes_on_to_the_next_column_round_the_end_and_turns_round():
    narrow = columns_for(79)
    order = Order("ttl", reverse=False)
    assert order.moved(1, narrow).key == "id"
    assert Order("id").moved(-1, narrow).key == "ttl"
    assert Order("name").moved(1, narrow).key == "state", "of a wider terminal: from the first one on"
    assert order.by("ttl") == dataclasses.replace(order, reverse=True) == order.turned()


@pytest.mark.parametrize(
    ("pattern", "ids"),
    [("", "bac"), ("RUNNING", "b"), ("front", "a"), ("team=blue", "c"), ("device idle", "ac"), ("nowhere", "")],
)
def test_a_filter_finds_rows_that_have_all_its_words_somewhere(pattern, ids):
    assert "".join(each.session_id for each in matching(ROWS, pattern)) == ids


@pytest.mark.parametrize("width", [79, 80, 109, 110, 139, 200])
def test_the_columns_fill_the_width_and_every_cell_keeps_to_its_column(width):
    columns = columns_for(width)
    assert sum(column.width for column in columns) + GAP * len(columns) == width
    wide = row("x" * 63, position=123456, used=2**60, shared=2**39, idle=86400.0 * 999, ttl=3599.0, name="y" * 90)
    for column in columns:
        assert len(cell(column, wide)) == column.width
        assert len(heading(column, Order(column.key))) == column.width


def test_what_callers_have_written_cannot_steer_the_terminal():
    name = next(column for column in COLUMNS if column.key == "name")
    shown = cell(name, row(name="a\x1b[2Jb\nc\td"))
    assert not any(ord(character) < 32 for character in shown)


# -------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (812, "812B"),
        (1024, "1.0K"),
        (47206, "46.1K"),
        (212 << 20, "212M"),
        (1023 << 20, "1.0G"),
        (2**60, "1048576T"),
    ],
)
def test_bytes_are_short(count, text):
    assert compact_bytes(count) == text
    assert len(text) <= 5 or count >= 1 << 50


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.2, "0s"), (59.7, "1m"), (61, "1m"), (12000, "3h20"), (86399, "23h59"), (5 * 86400, "5d")],
)
def test_spans_are_short(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.00693, "6.93 ms"), (0.12, "120 ms"), (0.9999, "1.00 s"), (2.5, "2.50 s"), (45, "45.0 s")],
)
def test_latencies_are_short(seconds, text):
    assert latency(seconds) == text


def test_rates_and_ids_are_short():
    assert [rate(value) for value in (None, 0.0, 99.94, 99.96, 1234.5)] == ["-", "0.0", "99.9", "100", "1234"]
    assert shortened("0123456789", 10) == "0123456789"
    assert shortened("0123456789", 7) == "0123…89", "both ends tell ids apart"


def test_a_sparkline_shows_the_last_values_between_zero_and_the_greatest():
    assert sparkline([9.0, 0.0, 1.0, None, 8.0], 4) == "▁▂ █"
    assert sparkline([1.0], 3) == "  █"
    assert sparkline([0.0, 0.0], 2) == "▁▁"
    assert sparkline([], 2) == "  "
    assert sparkline([1.0], 0) == ""


def test_shares_fill_the_bar_and_nothing_that_is_there_vanishes():
    parts = {"active": 1, "idle": 10**9, "slack": 0, "free": 10**9}
    given = shares(parts, 21)
    assert sum(given.values()) == 21
    assert (given["active"], given["slack"]) == (1, 0)
    assert abs(given["idle"] - given["free"]) <= 1
    assert set(shares(parts, 2).values()) == {0}, "too narrow to be true"
    assert set(shares(dict.fromkeys(parts, 0), 9).values()) == {0}


# --------------------------------------------------------------------------------------------------------- panels

FULL = {
    "active": 10 << 20,
    "pinned": 1 << 20,
    "idle": 995 << 20,
    "prefix": 3 << 20,
    "slack": 990 << 10,
    "free": 1 << 30,
}
TIERS = [Tier(name, sum(FULL.values()), FULL) for name in ("device", "host", "disk")]


@pytest.mark.parametrize("width", [79, 139, 200])
def test_no_line_is_wider_than_the_terminal(width):
    history = History()
    for second in range(300):
        load = {
            "running": 999,
            "queued": 99,
            "sessions": 4096,
            "generated": second * second,
            "prefilled": second * 9999,
        }
        history.add(snapshot(float(second), **load, first_token=Latency(1, 1.0, 99.9, 160.0)))
    seen = snapshot(300.0, **load, inter_token=Latency(1, 1.0, 0.0123, 0.999))
    texts = [
        panels.title(seen, "host:1", width),
        panels.activity(seen, 0.25, paused=True),
        panels.rates(seen, history, width),
        panels.cache(TIERS, "a note " * 40, width),
    ]
    lines = [line for text in texts for line in text.plain.split("\n")]
    print("\n".join(lines))
    assert max(map(len, lines)) <= width


def test_every_class_of_the_cache_has_a_glyph_of_its_own():
    """Told apart without colours: in each set of classes no two look alike."""
    for tier in (TIERS[0], Tier.rough(model_pb2.Load(), model_pb2.Limits())):
        glyphs = [panels.CLASSES[name].glyph for name in tier.parts]
        assert len(set(glyphs)) == len(glyphs)
        legend = panels.cache([tier], "", 79).plain.split("\n")[-1]
        assert all(f"{glyph} {name}" in legend for glyph, name in zip(glyphs, tier.parts, strict=True))


def test_before_the_first_answer_the_view_says_where_it_looks():
    assert "host:9" in panels.title(None, "host:9", 79).plain
    assert "PAUSED" in panels.activity(None, 1.0, paused=True).plain
    assert panels.rates(None, History(), 79).plain.count("\n") == 3


def test_a_peak_is_that_of_the_intervals_in_sight():
    """What scales a sparkline is told beside it, and nothing that has scrolled away."""
    history = History()
    history.add(snapshot(0.0))
    for second in range(1, 60):
        history.add(snapshot(float(second), generated=5000 + 10 * second))
    assert "peak 5010" in panels.rates(None, history, 139).plain
    assert "peak 10.0" in panels.rates(None, history, 79).plain
