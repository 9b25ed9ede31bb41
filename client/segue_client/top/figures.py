"""Numbers as a few characters, bars, sparklines. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NOTHING = "-"
_BLOCKS = "▁▂▃▄▅▆▇█"


def compact_bytes(count: int) -> str:
    """At most five characters: 0, 812B, 46.1K, 212M, 1.2G."""
    if count < 1024:
        return f"{count}B" if count else "0"
    value = float(count)
    for unit in "KMGT":
        value /= 1024
        if value < 999.5 or unit == "T":
            break
    return f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"


def span(seconds: float | None) -> str:
    """How long, at most five characters: 7s, 12m, 3h20 (hours and minutes), 5d."""
    if seconds is None:
        return NOTHING
    if seconds < 60:
        return f"{seconds:.0f}s" if seconds < 59.5 else "1m"
    if seconds < 3600:
        return f"{seconds // 60:.0f}m"
    if seconds < 86400:
        return f"{seconds // 3600:.0f}h{seconds % 3600 // 60:02.0f}"
    return f"{seconds // 86400:.0f}d"


def latency(seconds: float | None) -> str:
    """At most seven characters: 6.93 ms, 120 ms, 2.50 s, 45.0 s."""
    if seconds is None:
        return NOTHING
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1000, "ms")
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def rate(per_second: float | None) -> str:
    """At most six characters for less than a million."""
    if per_second is None:
        return NOTHING
    return f"{per_second:.1f}" if per_second < 99.95 else f"{per_second:.0f}"


def shortened(text: str, width: int) -> str:
    """Text in so many cells: what is too long loses its middle, since ids differ at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as blocks between 0 and the greatest of them, right-aligned; a blank where None."""
    shown = values[-width:] if width > 0 else []
    top = max((value for value in shown if value is not None), default=0.0)
    return "".join(_block(value, top) for value in shown).rjust(width)


def _block(value: float | None, top: float) -> str:
    if value is None:
        return " "
    return _BLOCKS[min(int(value / top * len(_BLOCKS)), len(_BLOCKS) - 1) if top > 0 else 0]


def shares(parts: Mapping[str, int], cells: int) -> dict[str, int]:
    """`cells` handed out by size: what is there gets one at least, the rest goes to the greatest remainders."""
    present = {name: size for name, size in parts.items() if size > 0}
    total = sum(present.values())
    if not total or cells < len(present):
        return dict.fromkeys(parts, 0)
    spare = cells - len(present)
    exact = {name: size / total * spare for name, size in present.items()}
    given = {name: 1 + int(share) for name, share in exact.items()}
    left = cells - sum(given.values())
    for name in sorted(exact, key=lambda name: int(exact[name]) - exact[name])[:left]:
        given[name] += 1
    return {name: given.get(name, 0) for name in parts}
