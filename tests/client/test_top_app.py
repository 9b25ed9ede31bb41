"""The keys of `segue top`, pressed in a terminal of textual's own, at 80x24, over a source that a test programs."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from textual.widgets import Input, Static

from segue_client import errors
from segue_client.top.app import TopApp
from segue_client.top.slots import Slots
from segue_client.top.snapshot import Load, Server, SessionRow, SessionTurns, Snapshot, TurnRow

SERVER = Server("host:1", "tiny", "0.1.0", "torch-cpu", 5.0, 256, 16)


def row(session_id, **fields):
    plain = {"state": "idle", "position": 1, "used": 0, "shared": 0, "tier": "device", "idle": 1.0, "ttl": 9.0}
    return SessionRow(session_id, **{**plain, **fields})


class ProgrammedSource:
    """Answers with what it is given, or fails with it."""

    def __init__(self):
        self.sessions = [
            row("alpha", position=10),
            row("beta", position=30),
            row("gamma", position=20, state="running"),
        ]
        self.error = None
        self.asked = 0

    async def snapshot(self):
        self.asked += 1
        if self.error:
            raise self.error
        return Snapshot(float(self.asked), SERVER, Load(running=1, generated=self.asked), (), tuple(self.sessions))

    async def turns(self, session_id):
        found = next((each for each in self.sessions if each.session_id == session_id), None)
        if found is None:
            raise errors.SessionNotFound("no such session")
        return SessionTurns(found, (TurnRow(0, "r-0", 0, 4, 10, "eos"), TurnRow(1, "r-1", 10, 13, 20, "")))


class Screen:
    """What stands on the terminal, and keys to press."""

    def __init__(self, app, pilot):
        self.app, self._pilot = app, pilot

    async def press(self, *keys):
        await self._pilot.press(*keys)
        await self._pilot.pause()

    async def wait(self, condition):
        """Until the screen is so."""
        async with asyncio.timeout(20):
            while not condition():
                await self._pilot.pause(0.02)

    def line(self, name):
        return str(self.app.screen.query_one(f"#{name}", Static).visual)

    @property
    def table(self):
        return self.app.screen.query_one(Slots)

    @property
    def rows(self):
        table = self.table
        return [[str(each).strip() for each in table.get_row_at(index)] for index in range(table.row_count)]

    @property
    def first_cells(self):
        return [cells[0] for cells in self.rows]


@pytest.fixture
def source():
    return ProgrammedSource()


@asynccontextmanager
async def opened(source, size=(80, 24)):
    """The view with its three sessions. No fixture: textual's context variables must be those of the test."""
    app = TopApp(source, "host:1", 0.05)
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot)
        await screen.wait(lambda: screen.table.row_count == 3)
        yield screen


async def test_sessions_appear_move_and_go_as_the_server_tells(source):
    """Rows are written in place: the cursor follows its session when another one comes before it."""
    async with opened(source) as screen:
        await screen.press("1", "down")
        assert (screen.first_cells, screen.table.chosen) == (["alpha", "beta", "gamma"], "beta")
        source.sessions.insert(0, row("aardvark"))
        await screen.wait(lambda: screen.table.row_count == 4)
        assert (screen.first_cells[0], screen.table.chosen, screen.table.cursor_row) == ("aardvark", "beta", 2)
        source.sessions[:] = source.sessions[-1:]
        await screen.wait(lambda: screen.table.row_count == 1)
        assert screen.table.chosen == "gamma"
        source.sessions.clear()
        await screen.wait(lambda: screen.table.row_count == 0)
        assert screen.table.chosen is None
        await screen.press("enter")


async def test_keys_sort_and_turn_round(source):
    """By number, by the next and the one before, and back to front; the heading says so."""
    async with opened(source) as screen:
        await screen.press("3")
        assert screen.first_cells == ["beta", "gamma", "alpha"]
        assert "pos▼" in str(screen.table.ordered_columns[2].label)
        await screen.press("r")
        assert screen.first_cells == ["alpha", "gamma", "beta"]
        assert "pos▲" in str(screen.table.ordered_columns[2].label)
        await screen.press("S")
        assert "state▲" in str(screen.table.ordered_columns[1].label)
        assert screen.first_cells == ["alpha", "beta", "gamma"]
        await screen.press("s", "3")
        assert screen.first_cells == ["alpha", "gamma", "beta"], "its own column again: the other way round"


async def test_a_filter_narrows_as_it_is_typed_and_escape_lifts_it(source):
    """Letters that are keys elsewhere are letters in the filter; Enter goes back to the table and keeps it."""
    async with opened(source) as screen:
        await screen.press("slash", *"gam")
        assert screen.first_cells == ["gamma"]
        await screen.press("enter")
        assert screen.table.has_focus
        assert screen.app.screen.query_one("#filter").display
        await screen.press("escape")
        assert sorted(screen.first_cells) == ["alpha", "beta", "gamma"]
        assert screen.app.screen.query_one(Input).value == ""
        await screen.press("slash", *"qsrp", "slash")
        assert screen.app.screen.query_one(Input).value == "qsrp/"
        assert (screen.app.is_running, screen.first_cells) == (True, [])


async def test_enter_shows_the_turns_of_the_session_and_escape_goes_back(source):
    """The newest turn first; a session that is deleted meanwhile is said to be gone."""
    async with opened(source) as screen:
        await screen.press("1", "down", "enter")
        await screen.wait(lambda: screen.table.row_count == 2)
        assert "beta" in screen.line("facts")
        assert [cells[:5] for cells in screen.rows] == [
            ["1", "10-20", "3", "7", "in flight"],
            ["0", "0-10", "4", "6", "eos"],
        ]
        await screen.press("down")
        assert "turn 0: request r-0" in screen.line("request")
        del source.sessions[1]
        await screen.wait(lambda: "session is gone" in screen.line("trouble"))
        await screen.press("escape")
        assert sorted(screen.first_cells) == ["alpha", "gamma"]


async def test_pause_shows_nothing_new_until_it_is_lifted(source):
    async with opened(source) as screen:
        await screen.press("p")
        assert "PAUSED" in screen.line("activity")
        source.sessions.append(row("delta"))
        asked = source.asked
        await asyncio.sleep(0.3)
        assert source.asked <= asked + 1, "one may have been on its way"
        assert len(screen.rows) == 3
        await screen.press("p")
        await screen.wait(lambda: screen.table.row_count == 4)
        assert "PAUSED" not in screen.line("activity")


async def test_a_server_that_goes_away_is_missed_and_welcomed_back(source):
    """The view says since when there is no answer, keeps what it knew, and goes on."""
    async with opened(source) as screen:
        assert not screen.app.screen.query_one("#trouble").display
        source.error = errors.Unavailable("connection refused\x1b[2J")
        await screen.wait(lambda: screen.app.screen.query_one("#trouble").display)
        assert "No answer from host:1 for 0s, trying again: connection refused" in screen.line("trouble")
        assert "\x1b" not in screen.line("trouble")
        assert len(screen.rows) == 3
        source.error = None
        await screen.wait(lambda: not screen.app.screen.query_one("#trouble").display)


async def test_help_lists_the_keys_over_what_is_shown(source):
    async with opened(source) as screen:
        await screen.press("question_mark")
        text = str(screen.app.screen.query_one("#help Static", Static).visual)
        assert "sort by the next column" in text
        await screen.press("escape")
        assert len(screen.rows) == 3


@pytest.mark.parametrize("size", [(80, 24), (140, 40), (60, 15), (200, 50)])
async def test_the_view_fits_terminals_of_many_sizes(source, size):
    """Nothing is drawn beyond the width, the table has room, and a wider terminal has more columns."""
    async with opened(source, size) as screen:
        assert screen.table.virtual_size.width <= size[0]
        assert screen.table.size.height >= 4
        assert len(screen.table.columns) == {60: 8, 80: 8, 140: 12, 200: 12}[size[0]]


@pytest.mark.parametrize(
    ("keys", "code"), [(["q"], 0), (["ctrl+c"], 130), (["slash", "ctrl+c"], 130), (["1", "enter", "q"], 0)]
)
async def test_q_and_ctrl_c_leave_from_everywhere(source, keys, code):
    async with opened(source) as screen:
        await screen.press(*keys)
    assert not screen.app.is_running
    assert (screen.app.return_code or 0) == code


def test_without_textual_the_command_says_what_to_install():
    """The other commands do not need it, and do not import it."""
    code = (
        "import sys; sys.modules['textual'] = None; import segue_client.cli.app; "
        "from segue_client.cli import top; top._shown('host:1', None, 1.0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr.strip()) == (
        1,
        "segue top needs the package textual: pip install 'segue[cli]'",
    )
