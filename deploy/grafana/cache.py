"""The board of the KV cache: what is kept, what that saves, what forgetting costs, and what sessions do."""

from panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    INTERVAL,
    NOT_EVICTABLE,
    PER_SECOND,
    PRESSURE,
    REUSED,
    SECONDS,
    SHARE,
    TOKENS,
    TOKENS_PER_SECOND,
    Panel,
    Query,
    Row,
    board,
    quantile,
    rate,
    select,
    share,
    total,
)

SOURCES = {"computed": "red", "session": "green", "prefix": "blue", "restored": "yellow"}
CLASSES = {"active": "green", "pinned": "purple", "idle": "blue", "prefix": "super-light-blue", "slack": "text"}
HELD = f"sum by (instance) ({select('kv_bytes', tier='device')})"
CAPACITY = f"sum by (instance) ({select('kv_capacity_bytes', tier='device')})"
BELOW = total("kv_capacity_bytes", "tier", tier="!device")
RECOMPUTING = {0.2: "red"}  # the alert SegueRecomputing

POOL = Row(
    "What is kept",
    [
        Panel(
            title="KV in the pool, by class",
            text=(
                "active: turns in the batch. pinned: may not be evicted. idle and prefix: can be, and are worth keeping"
                " until then. slack: the unfilled rest of last pages. Free is what is missing to the capacity."
            ),
            unit=BYTES,
            queries=[
                Query(total("kv_bytes", "class", tier="device"), "{{class}}"),
                Query(total("kv_capacity_bytes", tier="device"), "capacity"),
            ],
            stacked=True,
            colours=CLASSES,
            limit="capacity",
        ),
        Panel(
            title="How full the pool is",
            text=(
                "Held: all of it; from 0.9 on idle KV moves down a tier, where there is one. Not evictable: what turns "
                "in flight and pinned sessions hold; near 0.98 new turns have to wait. A pool that is held to the brim "
                "is a good cache; one that is not evictable is too small."
            ),
            unit=SHARE,
            queries=[
                Query(share(HELD, CAPACITY), "held {{instance}}"),
                Query(f"max by (instance) ({NOT_EVICTABLE})", "not evictable {{instance}}"),
            ],
            lines=PRESSURE,
        ),
        Panel(
            title="Below the pool",
            text=(
                "KV in host memory and on disk, and the budgets of both. Nothing here: the server runs without "
                "--kv-host-bytes and --kv-disk-bytes."
            ),
            unit=BYTES,
            queries=[
                Query(f"{total('kv_bytes', 'tier', tier='!device')} and on (tier) ({BELOW} > 0)", "{{tier}}"),
                Query(f"{BELOW} > 0", "budget of {{tier}}"),
            ],
        ),
    ],
)

SAVED = Row(
    "What it saves",
    [
        Panel(
            title="Where prompt tokens came from",
            text=(
                "Context and prompt positions of turns. computed went through the model; session was kept by the "
                "session itself; prefix is shared with others; restored came back from host memory or disk."
            ),
            unit=TOKENS_PER_SECOND,
            queries=[Query(rate("prompt_tokens_total", "source"), "{{source}}")],
            stacked=True,
            colours=SOURCES,
        ),
        Panel(
            title="Share that was not computed",
            text=(
                "Reused: of all positions. Found in the prefix index: of those that the session itself had no KV of; 0 "
                "means that equal prompts carry different cache salts, or are not equal."
            ),
            unit=SHARE,
            queries=[
                Query(REUSED, "reused"),
                Query(
                    share(rate("prefix_hit_tokens_total"), rate("prefix_query_tokens_total")),
                    "found in the prefix index",
                ),
            ],
        ),
        Panel(
            title="Moved between tiers",
            text=(
                "Bytes copied a second. Much device to host to device: sessions come back soon after they were moved "
                "out, so the pool is short."
            ),
            unit=BYTES_PER_SECOND,
            queries=[Query(rate("kv_moved_bytes_total", "from_tier", "to_tier"), "{{from_tier}} to {{to_tier}}")],
        ),
    ],
)

LOST = Row(
    "What forgetting costs",
    [
        Panel(
            title="Evictions, by tier and reason",
            text=(
                "KV that was dropped, not moved, and that somebody may want again. pressure: for want of room. ttl: the"
                " session expired. flush, caller: somebody asked for it."
            ),
            unit=PER_SECOND,
            queries=[Query(rate("kv_evictions_total", "tier", "reason"), "{{tier}} {{reason}}")],
        ),
        Panel(
            title="Recomputed tokens, by reason",
            text=(
                "Positions computed a second time. evicted: their KV was dropped. restarted: the server was. mismatch: "
                "an imported session's KV did not fit. slid: the context slid on."
            ),
            unit=TOKENS_PER_SECOND,
            queries=[Query(rate("recomputed_tokens_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        Panel(
            title="Share of prompt tokens recomputed after eviction",
            text="Above 0.2 for long, SegueRecomputing fires: the pool is too small for the sessions that come back.",
            unit=SHARE,
            queries=[
                Query(
                    share(rate("recomputed_tokens_total", reason="evicted"), rate("prompt_tokens_total")), "recomputed"
                ),
            ],
            lines=RECOMPUTING,
        ),
    ],
)

SESSIONS = Row(
    "Sessions",
    [
        Panel(
            title="Gap between two turns of a session",
            text=(
                "How many turns came how long after the one before. KV is worth keeping for as long as most gaps last: "
                "that is what the pool, the tiers below it and --default-ttl should cover."
            ),
            unit=SECONDS,
            queries=[Query(f"sum by (le) (increase({select('session_idle_seconds_bucket')}[{INTERVAL}]))", "{{le}}")],
            kind="heatmap",
        ),
        Panel(
            title="Sessions, by state",
            text="idle sessions cost memory only where they have KV. At --max-sessions new ones are refused.",
            unit=COUNT,
            queries=[Query(total("sessions", "state"), "{{state}}"), Query(total("sessions_limit"), "limit")],
            stacked=True,
            limit="limit",
        ),
        Panel(
            title="Length of contexts and turns, p95",
            text=(
                "Tokens. Context: a session after its turn; it times the bytes of a token is what the session needs in "
                "the pool."
            ),
            unit=TOKENS,
            queries=[
                Query(quantile(0.95, "session_context_tokens"), "context"),
                Query(quantile(0.95, "turn_prompt_tokens"), "appended"),
                Query(quantile(0.95, "turn_generated_tokens"), "generated"),
            ],
        ),
        Panel(
            title="Opened and ended",
            text="Sessions a second, by origin and by reason. expired: nobody came back within the time to live.",
            unit=PER_SECOND,
            queries=[
                Query(rate("sessions_opened_total", "origin"), "opened: {{origin}}"),
                Query(rate("sessions_ended_total", "reason"), "ended: {{reason}}"),
            ],
        ),
        Panel(
            title="Positions with KV, by tier",
            text="Tokens that need not be computed again.",
            unit=TOKENS,
            queries=[Query(total("kv_tokens", "tier"), "{{tier}}")],
            stacked=True,
        ),
        Panel(
            title="Memory of the process",
            text=(
                "Resident memory beside the KV in the pool and in host memory. The distance is weights and the "
                "interpreter; one that keeps growing is a leak."
            ),
            unit=BYTES,
            queries=[
                Query('sum(process_resident_memory_bytes{job="segue", instance=~"$instance"})', "resident"),
                Query(f"{total('kv_bytes', tier='device')} + {total('kv_bytes', tier='host')}", "KV"),
            ],
        ),
    ],
)

CACHE = board(
    "segue-cache",
    "Segue / Cache",
    "What the KV cache holds, saves and forgets. docs/operations.md says how to read it.",
    [POOL, SAVED, LOST, SESSIONS],
)
