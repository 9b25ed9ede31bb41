"""What stands above the table, as text in colours that the colour-blind can tell apart (Okabe and Ito).

No colour carries meaning alone: every class of bytes has a glyph of its own, every state is a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.text import Text

from segue_client.cli.text import printable
from segue_client.top.figures import NOTHING, compact_bytes, latency, rate, shares, shortened, span, sparkline
from segue_client.top.history import History
from segue_client.top.snapshot import Latency, Load, SessionTurns, Snapshot, Tier

WIDE = 120  # cells from which every tier has its classes beside it
_LABEL = 12  # cells
_FIGURES = 30  # cells beside a sparkline


class Class(NamedTuple):
    """How a class of bytes is drawn."""

    glyph: str
    colour: str


CLASSES: Mapping[str, Class] = {
    "active": Class("█", "#e69f00"),
    "in use": Class("█", "#e69f00"),
    "pinned": Class("▓", "#56b4e9"),
    "idle": Class("▒", "#009e73"),
    "evictable": Class("▒", "#009e73"),
    "prefix": Class("░", "#f0e442"),
    "slack": Class("/", "#cc79a7"),
    "free": Class("·", "dim"),
}
STATES: Mapping[str, str] = {"running": "bold #e69f00", "queued": "bold #f0e442", "moving": "bold #56b4e9"}


def title(snapshot: Snapshot | None, target: str, width: int) -> Text:
    """Who answers."""
    if snapshot is None:
        return Text.assemble(("segue top", "bold"), f"  {target}")
    server = snapshot.server
    known = f"  {server.target}  up {span(server.uptime)}  segue {server.version}"
    room = width - len("segue top") - len(known) - 4
    build = server.build if len(server.model) + len(server.build) <= room else ""
    line = Text.assemble(("segue top", "bold"), known, "  ", (printable(shortened(server.model, max(room, 8))), "bold"))
    return line.append(f"  {build}" if build else "")


def activity(snapshot: Snapshot | None, interval: float, paused: bool) -> Text:
    """How many turns and sessions there are, and how fresh this is."""
    line = Text()
    if snapshot is not None:
        load, server = snapshot.load, snapshot.server
        line.append(f"{load.running} of {server.max_running} turns running, {load.queued} queued", "bold")
        line.append(f"  {load.sessions} of {server.max_sessions} sessions  step {span(load.silence)} ago")
        if load.draining:
            line.append("  DRAINING", "bold reverse")
    line.append("  ")
    return line.append(" PAUSED ", "bold reverse") if paused else line.append(f"every {interval:g}s", "dim")


def rates(snapshot: Snapshot | None, history: History, width: int) -> Text:
    """Four sparklines with their figures; a peak is that of the intervals in sight."""
    load, now = snapshot.load if snapshot else Load(), history.now
    cells = max(width - _LABEL - _FIGURES, 1)
    generated, prefilled = history.generated[-cells:], history.prefilled[-cells:]
    lines = [
        _line("out tok/s", generated, _peaked(now.generated, generated), cells),
        _line("in tok/s", prefilled, _peaked(now.prefilled, prefilled), cells),
        _line("TTFT", history.first_token, _quantiles(load.first_token), cells),
        _line("inter-token", history.inter_token, _quantiles(load.inter_token), cells),
    ]
    return Text("\n").join(lines)


def _line(label: str, values: Sequence[float | None], told: str, cells: int) -> Text:
    return Text.assemble((label.ljust(_LABEL), "bold"), (sparkline(values, cells), "#56b4e9"), f"  {told}")


def _peaked(now: float | None, values: Sequence[float | None]) -> str:
    top = max((value for value in values if value is not None), default=None)
    return f"{rate(now):>8}  peak {rate(top)}"


def _quantiles(lately: Latency) -> str:
    if lately.median is None:
        return f"{NOTHING:>8}"
    return f"{latency(lately.median):>8}  p95 {latency(lately.p95)}"


def cache(tiers: Sequence[Tier], note: str, width: int) -> Text:
    """A bar for each tier, and what its glyphs mean."""
    wide = width >= WIDE
    lines = [_bar(tier, width, wide=wide) for tier in tiers]
    if tiers:
        lines.append(_legend(tiers[0], with_sizes=not wide))
    if note:
        lines.append(Text(shortened(note, width), "italic dim"))
    return Text("\n").join(lines)


def _bar(tier: Tier, width: int, *, wide: bool) -> Text:
    of = f"{compact_bytes(tier.held)} of {compact_bytes(tier.capacity)}"
    share = f"{tier.held / tier.capacity:.0%}" if tier.capacity else NOTHING
    told = f"  {share:>4}  {of:<14}"
    if wide:
        told += "".join(f"  {name} {compact_bytes(size):<5}" for name, size in tier.parts.items() if name != "free")
    line = Text(tier.name.ljust(_LABEL), "bold")
    for name, cells in shares(tier.parts, max(width - _LABEL - len(told), 0)).items():
        line.append(CLASSES[name].glyph * cells, f"not bold {CLASSES[name].colour}")
    return line.append(told, "not bold")


def _legend(tier: Tier, *, with_sizes: bool) -> Text:
    line = Text()
    for name, size in tier.parts.items():
        told = f" {name} {compact_bytes(size)} " if with_sizes and name != "free" else f" {name} "
        line.append(CLASSES[name].glyph, CLASSES[name].colour).append(told, "dim")
    return line


def session_facts(found: SessionTurns, width: int) -> Text:
    """The session whose turns are shown, in two lines."""
    row = found.session
    state = Text(row.state, STATES.get(row.state, ""))
    head = Text.assemble((shortened(row.session_id, width - 24), "bold"), "  ", state, "  pinned" if row.pinned else "")
    if row.name:
        head.append(f"  {printable(row.name)}".replace("\n", " "), "italic")
    kv = f"KV {compact_bytes(row.used)} in {row.tier}, shared {compact_bytes(row.shared)}, {row.cached} tokens cached"
    facts = f"position {row.position}  {kv}  idle {span(row.idle)}  TTL {span(row.ttl)}"
    head.truncate(width, overflow="ellipsis")
    return head.append("\n").append(shortened(facts, width))
