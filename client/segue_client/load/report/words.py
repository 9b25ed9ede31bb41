"""Numbers for people: three digits, and the unit that keeps them short."""

from __future__ import annotations

NOTHING = "\N{EN DASH}"


def duration(seconds: float | None) -> str:
    """ "850 µs", "12.3 ms", "1.24 s"."""
    if seconds is None:
        return NOTHING
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if abs(seconds) * factor < 999.5:
            return f"{digits(seconds * factor)} {unit}"
    return f"{digits(seconds)} s"


def round_duration(seconds: float) -> str:
    """A round number without needless zeros: "50 ms", "1 s"."""
    value, unit = duration(seconds).split()
    return f"{float(value.replace(',', '')):g} {unit}"


def digits(value: float | None) -> str:
    """Three digits, or all those before the point: "0.0123", "12.3", "12,345"."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 0.9995 else f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"


def count(value: int | None) -> str:
    """ "12,345"."""
    return NOTHING if value is None else f"{value:,}"


def share(value: float | None) -> str:
    """ "12.3 %"; a little of something is never written as nothing, nor almost all of it as all."""
    if value is None:
        return NOTHING
    if 0 < value < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= value < 1:
        return "> 99.9 %"
    return f"{value * 100:.1f} %"


def change(ratio: float) -> str:
    """A ratio as what it changes: "+12.3 %"."""
    return f"{(ratio - 1) * 100:+.1f} %"
