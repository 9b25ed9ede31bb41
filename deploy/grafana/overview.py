"""The board to look at first: what the server does now, traffic, latency, the engine."""

from panels import (
    COUNT,
    INTERVAL,
    NOT_EVICTABLE,
    PER_SECOND,
    PRESSURE,
    REUSED,
    SECONDS,
    SHARE,
    TOKENS_PER_SECOND,
    TURNS_PER_SECOND,
    Panel,
    Query,
    Row,
    board,
    quantile,
    quantiles,
    rate,
    share,
    total,
)

CONTEXTS = {"new": "blue", "warm": "green", "restored": "yellow", "recomputed": "red"}
CALLS = 'grpc_server_call_duration_seconds_count{instance=~"$instance"}'  # of gRPC, so without a model
ALERTS = 'ALERTS{alertname=~"Segue.*", alertstate="firing", instance=~"$instance"}'


def stat(title: str, text: str, unit: str, expr: str, lines: dict[float, str] | None = None) -> Panel:
    queries = [Query(expr, title)]
    return Panel(title=title, text=text, unit=unit, queries=queries, kind="stat", width=3, height=4, lines=lines or {})


NOW = Row(
    "Now",
    [
        stat("Running", "Turns in the batch.", COUNT, total("turns_running")),
        stat(
            "Queued",
            "Turns that wait for a place, for cache, or for another turn of their session.",
            COUNT,
            total("turns_queued"),
        ),
        stat("Sessions", "Sessions that exist, whatever they do.", COUNT, total("sessions")),
        stat("Generated", "Sampled tokens a second.", TOKENS_PER_SECOND, rate("generated_tokens_total")),
        stat("Reused", "Share of context and prompt positions whose KV was there already.", SHARE, REUSED),
        stat(
            "Pool in use",
            "The fullest pool: what turns in flight and pinned sessions hold, which eviction cannot free.",
            SHARE,
            f"max({NOT_EVICTABLE})",
            PRESSURE,
        ),
        stat(
            "Draining",
            "Servers that take no new work because they are about to stop.",
            COUNT,
            total("draining"),
            {1: "orange"},
        ),
        stat(
            "Alerts",
            "Firing now; docs/operations.md says what to do about each.",
            COUNT,
            f"count({ALERTS}) or vector(0)",
            {1: "red"},
        ),
    ],
)

TRAFFIC = Row(
    "Traffic",
    [
        Panel(
            title="Turns ended, by reason",
            text=(
                "eos, stops and max_tokens are answers; cancelled is the caller's doing; error, preempted and draining "
                "are the server's."
            ),
            unit=TURNS_PER_SECOND,
            queries=[Query(rate("turns_total", "finish_reason"), "{{finish_reason}}")],
            width=6,
            stacked=True,
        ),
        Panel(
            title="Tokens in and out",
            text=(
                "In: what callers appended, counted when their turn ends. Computed: prompt positions that went through "
                "the model, counted when it starts. Out: sampled tokens."
            ),
            unit=TOKENS_PER_SECOND,
            queries=[
                Query(rate("generated_tokens_total"), "out"),
                Query(rate("turn_prompt_tokens_sum"), "in"),
                Query(rate("prompt_tokens_total", source="computed"), "computed"),
            ],
            width=6,
        ),
        Panel(
            title="Queued, by what is short",
            text=(
                "slots: --max-running turns are in the batch. kv_budget: the pool cannot promise the next turn its "
                "pages. session_busy: waits behind another turn of its own session."
            ),
            unit=COUNT,
            queries=[Query(total("turns_queued", "reason"), "{{reason}}")],
            width=6,
            stacked=True,
        ),
        Panel(
            title="Rejected, by reason",
            text="Requests refused before any work was done. Callers are told when to come back where that can help.",
            unit=PER_SECOND,
            queries=[Query(rate("admission_rejections_total", "reason"), "{{reason}}")],
            width=6,
            stacked=True,
        ),
    ],
)


def first_token(q: float) -> Panel:
    return Panel(
        title=f"Time to first token, p{q * 100:.0f}, by context",
        text=(
            "Arrival to first token. The distance between warm and recomputed is what a kept cache saves. A gap: no "
            "such turn."
        ),
        unit=SECONDS,
        queries=[Query(quantile(q, "time_to_first_token_seconds", "context"), "{{context}}")],
        colours=CONTEXTS,
    )


LATENCY = Row(
    "Latency",
    [
        first_token(0.5),
        first_token(0.95),
        first_token(0.99),
        Panel(
            title="Gap between tokens",
            text=(
                "Between two tokens of a turn, on the server. A p99 far above p50: prompts of others, paused readers or"
                " preemption hold streams up."
            ),
            unit=SECONDS,
            queries=quantiles("inter_token_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            title="Where a turn's time goes, p95",
            text="Queue: arrival to a place. Prefill: place to first token. Turn: arrival to end.",
            unit=SECONDS,
            queries=[
                Query(quantile(0.95, "queue_seconds"), "queue"),
                Query(quantile(0.95, "prefill_seconds"), "prefill"),
                Query(quantile(0.95, "turn_duration_seconds"), "turn"),
            ],
        ),
        Panel(
            title="Calls, by status",
            text="RPCs that ended, streams included, by gRPC status. OK and CANCELLED are everyday.",
            unit=PER_SECOND,
            queries=[
                Query(f"sum by (grpc_status) (rate({CALLS}[{INTERVAL}]))", "{{grpc_status}}"),
            ],
            stacked=True,
        ),
    ],
)

ENGINE = Row(
    "Engine",
    [
        Panel(
            title="Engine time, by what it did",
            text=(
                "Seconds of engine time a second; what is missing to 1 for each server is idle. Mostly prefill: prompts"
                " are the load; move: the pool is too small for its sessions."
            ),
            unit=SHARE,
            queries=[Query(rate("engine_busy_seconds_total", "phase"), "{{phase}}")],
            stacked=True,
        ),
        Panel(
            title="Step time, p95, by phase",
            text=(
                "One forward pass. A step that computes any prompt counts as prefill; --prefill-chunk-tokens bounds it."
            ),
            unit=SECONDS,
            queries=[Query(quantile(0.95, "engine_step_seconds", "phase"), "{{phase}}")],
        ),
        Panel(
            title="Sequences in a step",
            text="How much batching there is to gain from.",
            unit=COUNT,
            queries=[
                Query(share(rate("step_batch_size_sum"), rate("step_batch_size_count")), "mean"),
                Query(quantile(0.95, "step_batch_size"), "p95"),
            ],
        ),
        Panel(
            title="Cancelled and preempted",
            text="Turns that ended before their time, by cause, and turns that went back to the queue to free cache.",
            unit=TURNS_PER_SECOND,
            queries=[
                Query(rate("cancellations_total", "cause"), "{{cause}}"),
                Query(rate("preemptions_total"), "preempted"),
            ],
        ),
        Panel(
            title="Wasted tokens, by reason",
            text="Computed and not kept or delivered: the cost of turns that were cut short.",
            unit=TOKENS_PER_SECOND,
            queries=[Query(rate("wasted_tokens_total", "reason"), "{{reason}}")],
            stacked=True,
        ),
        Panel(
            title="Turns paused by slow readers",
            text=(
                "How many, on average, stood still because nobody read what they had said. They keep their place and "
                "their cache. A pause counts when it ends."
            ),
            unit=COUNT,
            queries=[Query(rate("stream_blocked_seconds_total"), "paused")],
        ),
    ],
)

OVERVIEW = board(
    "segue-overview",
    "Segue / Overview",
    "Traffic, latency and the engine. docs/operations.md says how to read it.",
    [NOW, TRAFFIC, LATENCY, ENGINE],
)
