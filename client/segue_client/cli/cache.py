"""`segue cache`: what operators ask of a server, on its admin port."""

from __future__ import annotations

import json
from typing import Annotated, Literal, cast

import typer

from segue.v1.cache_pb2 import CacheEntry, CacheStats, TierStats
from segue.v1.types_pb2 import CacheTier
from segue_client.admin import DEFAULT_ADMIN_TARGET
from segue_client.cli import arguments
from segue_client.cli.exits import administering
from segue_client.cli.output import print_document, print_json, print_rows
from segue_client.cli.text import as_document, printable, since, size

app = typer.Typer(no_args_is_help=True, help="Look into the server's cache, resize and flush it, prove it, drain.")

TierName = Literal["device", "host", "disk"]
TIERS = ("device", "host", "disk")
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
EVENTS_TIMEOUT = 7 * 24 * 3600.0  # seconds
_CLASSES = ("active", "pinned", "idle", "prefix", "slack", "free")

Tier = Annotated[str | None, typer.Option("--tier", help="device, host or disk; default: all.")]


@app.command()
def stats(target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET, as_json: arguments.Json = False) -> None:
    """Show bytes by tier and class, and what eviction has cost."""
    with administering(target, as_json) as admin:
        _print_stats(admin.stats(), as_json)


@app.command()
def entries(
    tier: Tier = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 50,
    target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """List what is cached: the first one is dropped next."""
    with administering(target, as_json) as admin:
        found = [entry for entry, _ in zip(admin.entries(tier=_tier(tier)), range(limit), strict=False)]
    if as_json:
        print_json([as_document(entry) for entry in found])
    else:
        print_rows(
            ("entry", "sessions", "from", "tokens", "KV", "priority", "last used", "protected"), map(_row, found)
        )


@app.command()
def flush(
    idle_sessions: Annotated[bool, typer.Option("--idle-sessions", help="KV of idle, unpinned sessions.")] = False,
    prefixes: Annotated[bool, typer.Option("--prefixes", help="Shared prefixes that no session holds.")] = False,
    salt: Annotated[str, typer.Option(help="Only of this cache salt; default: of every one.")] = "",
    target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Drop KV that nobody uses; tokens stay, so nothing is lost but time."""
    with administering(target, as_json) as admin:
        answer = admin.flush(idle_sessions=idle_sessions, prefixes=prefixes, cache_salt=salt)
    if as_json:
        print_json(as_document(answer))
    else:
        typer.echo(f"{size(answer.freed_bytes)} freed, of {answer.sessions} sessions")


@app.command()
def budget(
    tier: Annotated[str, typer.Argument(help="device, host or disk.")],
    capacity: Annotated[str, typer.Argument(help="Bytes; a suffix KiB, MiB or GiB is understood.")],
    target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Resize a tier while the server runs."""
    name, wanted = _tier(tier), _bytes(capacity)
    with administering(target, as_json) as admin:
        _print_stats(admin.set_budget(name or "device", wanted), as_json)


@app.command()
def verify(
    session_id: arguments.SessionId,
    target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Compute a session a second time and compare; exit code 1 when its cache is not what it should be."""
    with administering(target, as_json) as admin:
        answer = admin.verify(session_id)
    print_document(as_document(answer), as_json)
    if not answer.argmax_equal:
        raise typer.Exit(1)


@app.command()
def events(
    after_sequence: Annotated[int, typer.Option(min=0, help="Go on after this one; 0 = from now.")] = 0,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Send what is cached now first.")] = False,
    target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Follow what can be hit in the prefix index; ends with Ctrl-C."""
    with administering(target, as_json) as admin:
        following = admin.events(after_sequence=after_sequence, include_snapshot=snapshot, timeout=EVENTS_TIMEOUT)
        for batch in following:
            document = as_document(batch)
            typer.echo(json.dumps(document) if as_json else printable(_told(batch.sequence, document)))


@app.command()
def drain(
    grace: Annotated[
        float | None, typer.Option(min=0, help="Seconds running turns get; default: the server's.")
    ] = None,
    target: arguments.AdminTarget = DEFAULT_ADMIN_TARGET,
    as_json: arguments.Json = False,
) -> None:
    """Have the server take no new work and let running turns end."""
    with administering(target, as_json) as admin:
        running = admin.drain(grace=grace)
    if as_json:
        print_json({"running_requests": running})
    else:
        typer.echo(f"draining; {running} turns are in flight")


def _print_stats(stats: CacheStats, as_json: bool) -> None:
    if as_json:
        print_json(as_document(stats))
        return
    print_rows(("tier", "capacity", *_CLASSES), map(_tier_row, stats.tiers))
    print_rows(
        ("", ""),
        [
            ("evictions", str(stats.evictions)),
            ("evicted tokens", str(stats.evicted_tokens)),
            ("recomputed tokens", str(stats.recomputed_tokens)),
            ("prefix tokens found", f"{stats.prefix_hit_tokens} of {stats.prefix_query_tokens}"),
        ],
    )


def _tier_row(tier: TierStats) -> tuple[str, ...]:
    sizes = (size(getattr(tier, f"{name}_bytes")) for name in _CLASSES)
    return CacheTier.Name(tier.tier).removeprefix("CACHE_TIER_").lower(), size(tier.capacity_bytes), *sizes


def _row(entry: CacheEntry) -> tuple[str, ...]:
    return (
        entry.entry_id,
        ", ".join(entry.session_ids),
        str(entry.start_position),
        str(entry.tokens),
        size(entry.size_bytes),
        str(entry.priority),
        since(entry.last_used_time),
        entry.protection.lower(),
    )


def _told(sequence: int, batch: dict[str, object]) -> str:
    kinds = [kind for event in cast("list[dict[str, object]]", batch.get("events", [])) for kind in event]
    return f"{sequence}: {', '.join(kinds)}"


def _tier(name: str | None) -> TierName | None:
    if name not in (None, *TIERS):
        raise typer.BadParameter("must be device, host or disk", param_hint="tier")
    return cast("TierName | None", name)


def _bytes(text: str) -> int:
    number, factor = text.strip().lower(), 1
    for unit, worth in UNITS.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), worth
    try:
        return int(float(number) * factor) if factor > 1 else int(number)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number of bytes, such as 512MiB", param_hint="capacity") from None
