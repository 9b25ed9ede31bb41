"""The keys, and what the words mean."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

TEXT = """\
 s S       sort by the next column, the one before
 1 … 9     sort by that column; again: the other way round
 r         the other way round
 /         show only sessions with these words; Esc: all
 ↑ ↓ Enter choose a session, see its turns; Esc: back
 p         pause        q  Ctrl-C   leave

 out, in   tokens sampled, positions run through prefill
 TTFT      time to first token; inter-token: the gap
           between two. Figures: the last few seconds;
           sparklines: the mean of each interval
 active    KV of running turns   pinned  never evicted
 idle, prefix   evicted when room is needed
 slack     reserved, holding no token
 -         not known, or nothing was measured"""


class HelpScreen(ModalScreen[None]):
    """Any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,enter,space", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """One box."""
        with VerticalScroll(id="help") as box:
            box.border_title = "segue top"
            box.border_subtitle = "Esc closes"
            yield Static(TEXT, markup=False)
