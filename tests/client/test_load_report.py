"""Reports of load tests: what the terminal and the page say is what was measured, and nobody's name steers either."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.client import load_results as made
from typer.testing import CliRunner

from segue_client.cli.app import app
from segue_client.load.report import charts, tables, words
from segue_client.load.report.blocks import Chart, Style
from segue_client.load.report.html import page
from segue_client.load.report.plots import figure
from segue_client.load.report.sections import sections
from segue_client.load.report.terminal import show
from segue_client.load.results import ContextKind, Experiment, Outcome, Results
from segue_client.load.summary import summarize

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\x1b[31m"
VOID = {"meta", "link", "img", "br", "hr", "input"}


@pytest.fixture(scope="module", params=list(Experiment))
def results(request: pytest.FixtureRequest) -> Results:
    return made.EXPERIMENTS[request.param]()


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return page(results)


@pytest.fixture(scope="module")
def told(text: str) -> Page:
    return Page(text)


def printed(results: Results) -> str:
    out = Console(file=io.StringIO(), width=200, markup=False)
    show(sections(results), out)
    return out.file.getvalue()


def all_charts(results: Results) -> list[Chart]:
    return [chart for section in sections(results) for chart in section.charts]


def chart(results: Results, title: str) -> Chart:
    return next(chart for chart in all_charts(results) if chart.title == title)


def row(text: str, title: str, name: str) -> list[str]:
    """The cells of a row, from the printed table of that title."""
    text = "\n" + text
    lines = text[re.search(rf"\n{title} +\n", text).start() :].splitlines()
    rows = (re.split(r"\s{2,}", line.strip()) for line in lines)
    return next(cells for cells in rows if cells[0] == name)


class Page(HTMLParser):
    """What a browser would see in a page: elements, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.elements.append((tag, values))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((values, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            values, text = self.scripts[-1]
            self.scripts[-1] = values, text + data
        elif not self._open or self._open[-1] != "style":
            self.text += data

    @property
    def run(self) -> list[str]:
        """The scripts that a browser would run."""
        return [text for values, text in self.scripts if values.get("type") != "application/json"]

    @property
    def plots(self) -> list[dict[str, list[dict[str, object]]]]:
        return [json.loads(text) for values, text in self.scripts if "data-plot" in values]


# ------------------------------------------------------------------------------------------------- the terminal


def test_terminal_says_what_the_summary_says(results: Results) -> None:
    """Throughput and every percentile of every point, from the same records."""
    text = printed(results)
    for point in results.points:
        found, name = summarize(results, point), point.label if len(results.points) > 1 else "all"
        assert words.digits(found.token_rate) in row(text, "Throughput", name)
        for title, spread in (("Time to first token", found.ttft), ("Inter-token latency", found.inter_token)):
            assert spread is not None
            expected = (spread.p50, spread.p90, spread.p95, spread.p99, spread.maximum)
            assert row(text, title, name)[-5:] == [words.duration(value) for value in expected]


def test_head_names_target_versions_workload_and_seed(results: Results) -> None:
    text = printed(results)
    for said in ("small-model", "127.0.0.1:50051", "1.85.3", "lognormal:120,0.6", "a processor, 2 cores, 24.0 GiB"):
        assert said in text
    assert row(text, "Test", "seed") == ["seed", "7"]


def test_kinds_of_context_are_told_apart() -> None:
    run = made.run()
    times = sorted(r.time_to_first_token for r in run.requests if r.context is ContextKind.RESTORED)
    assert row(printed(run), "Time to first token", "restored")[1:3] == ["100", words.duration(times[49])]


def test_tokens_are_counted_by_where_their_kv_came_from() -> None:
    told = [
        made.request(0, 0.1, user=0, history_tokens=30, computed_tokens=10, reused_tokens=20, restored_tokens=10),
        made.request(1, 0.1, user=1, history_tokens=10, computed_tokens=110, reused_tokens=0),
    ]
    text = printed(made.results(Experiment.RUN, [made.point("run")], told))
    assert row(text, "Tokens", "all") == ["all", "2", "40", "200", "120", "20", "10", "20.0 %", "2"]


def test_a_narrow_window_breaks_headers_and_no_figure(results: Results) -> None:
    out = Console(file=io.StringIO(), width=90, markup=False)
    show(sections(results), out)
    for point in results.points:
        found = summarize(results, point)
        assert words.duration(found.ttft.p99) in out.file.getvalue()
        assert words.duration(found.inter_token.maximum) in out.file.getvalue()


def test_errors_are_counted_by_their_text() -> None:
    failed = [
        made.request(n, 0.1, user=n, outcome=Outcome.FAILED if n < 3 else Outcome.OK, error="no" if n < 3 else "")
        for n in range(4)
    ]
    text = printed(made.results(Experiment.RUN, [made.point("run")], failed))
    assert row(text, "Reasons", "failed") == ["failed", "no", "3"]
    assert row(text, "Outcomes", "all") == ["all", "4", "1", "0", "0", "3", "0", "75.0 %"]


def test_a_tester_that_was_the_bottleneck_is_a_warning_in_both_media() -> None:
    busy = replace(made.TESTER, cpu_share=0.98, bottleneck="it used 98 % of a core")
    run = made.results(Experiment.RUN, [made.point("run", tester=busy)], [made.request(0, 0.1)])
    assert "the load tester was the bottleneck (it used 98 % of a core)" in printed(run)
    assert row(printed(run), "The tester itself", "run")[-1] == "YES"
    assert any(values.get("role") == "alert" for _, values in Page(page(run)).elements)
    assert "bottleneck (" not in printed(made.run())


def test_a_sweep_answers_with_its_goodput() -> None:
    text = printed(made.sweep())
    assert "Goodput: 6.00 arrivals/s kept every objective; 7.00 arrivals/s did not." in text
    assert row(text, "Objectives", "7.00") == ["7.00", "737 ms (NO)", "57.1 ms", "0.0 %", "NO"]


def test_a_sweep_that_found_only_one_bound_says_so() -> None:
    sweep = made.sweep()
    held, failed = replace(sweep, points=sweep.points[:2]), replace(sweep, points=sweep.points[2:3])
    assert "Goodput: at least 4.00 arrivals/s; every rate that was tried kept the objectives." in printed(held)
    assert "No rate that was tried kept the objectives; the lowest was 8.00 arrivals/s." in printed(failed)


def test_a_mixed_experiment_answers_with_the_streams_p99() -> None:
    mixed = made.mixed()
    p99s = [summarize(mixed, point, "stream").inter_token.p99 for point in mixed.points]
    assert f"is {words.duration(p99s[1])} instead of {words.duration(p99s[0])} (+" in printed(mixed)


def test_a_context_that_the_server_did_not_see_is_a_warning() -> None:
    """A turn that was to be restored and was found warm must not pass for a fast restore."""
    asked = made.point("history 256, restored", history_tokens=256, context=ContextKind.RESTORED)
    turns = [
        made.request(n, 0.1, [0.01], user=n, context=kind)
        for n, kind in enumerate((ContextKind.WARM, ContextKind.WARM, ContextKind.RESTORED))
    ]
    said = printed(made.results(Experiment.CONTEXT, [asked], turns))
    assert "history 256, restored: by the server's count its turns were: 2 warm, 1 restored" in said
    assert "by the server's count" not in printed(made.context())


def test_results_without_a_point_or_an_answer_still_make_a_report(results: Results) -> None:
    """An interrupted test, and a server that failed every request."""
    failed = tuple(replace(r, token_times=(), outcome=Outcome.FAILED, error="down") for r in results.requests)
    nothing, all_failed = replace(results, points=(), requests=()), replace(results, requests=failed)
    assert "Outcomes" in printed(all_failed)
    assert "requests" not in printed(nothing)  # no table without a row
    assert all(figure(chart) for broken in (nothing, all_failed) for chart in all_charts(broken))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "–"), (0.0, "0 µs"), (85e-6, "85.0 µs"), (0.9999, "1.00 s"), (0.0123, "12.3 ms"), (1234.5, "1,234 s")],  # noqa: RUF001
)
def test_durations_keep_three_digits(seconds: float | None, said: str) -> None:
    assert words.duration(seconds) == said


def test_shares_near_none_and_all_are_not_rounded_to_them() -> None:
    assert [words.share(value) for value in (0.0, 1e-5, 0.5, 0.99999, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "50.0 %",
        "> 99.9 %",
        "100.0 %",
    ]


# ----------------------------------------------------------------------------------------------------- the page


def test_page_parses_and_holds_every_plot_with_all_of_its_data(results: Results, told: Page) -> None:
    """What the page's scripts draw is, point by point, what the charts hold."""
    drawn = all_charts(results)
    assert len(told.plots) == len(drawn) >= 5
    for plot, expected in zip(told.plots, drawn, strict=True):
        for trace, curve in zip(plot["data"], expected.curves, strict=False):
            assert tuple(trace["y"]) == curve.y
            assert tuple(trace["x"]) == curve.x
        names = [trace["name"] for trace in plot["data"]]
        assert names[: len(expected.curves)] == [curve.name for curve in expected.curves]


def test_every_plot_has_a_table_on_the_page(results: Results, told: Page) -> None:
    for drawn in all_charts(results):
        assert drawn.table.rows
        assert drawn.table.title in told.text


def test_page_asks_nobody_for_anything(results: Results, text: str, told: Page) -> None:
    """No address but those of its own sections, and a policy that forbids all loading, even to the plotting library."""
    for tag, values in told.elements:
        assert tag not in {"link", "iframe", "object", "embed", "form", "base", "img"}
        for name in ("src", "href", "action", "data", "srcset"):
            assert values.get(name, "#").startswith("#"), (tag, values)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(v["content"] for _, v in told.elements if v.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    hashes = ["'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'" for s in told.run]
    assert f"script-src {' '.join(hashes)}" in policy
    assert "showSendToCloud: false" in told.run[1]
    print(f"\n{results.experiment}: {len(text) / 1e6:.2f} MB, of which plotly {len(told.run[0]) / 1e6:.2f} MB")
    assert len(text) < 6e6


def test_hostile_names_stay_text(results: Results) -> None:
    """In the model's name, an error, a label, a word of the workload and a note: they open no element, run nothing."""
    metadata = replace(
        results.metadata,
        target=replace(results.metadata.target, model=HOSTILE, server=HOSTILE),
        workload={HOSTILE: HOSTILE},
    )
    hostile = replace(
        results,
        metadata=metadata,
        notes=(HOSTILE,),
        points=tuple(replace(point, label=f"{HOSTILE}{point.label}") for point in results.points),
        requests=tuple(replace(r, outcome=Outcome.FAILED, error=HOSTILE) for r in results.requests),
    )
    told = Page(page(hostile))
    assert len(told.run) == 2
    assert not any("alert(" in script for script in told.run[1:])
    assert not any(tag == "img" or "onerror" in values for tag, values in told.elements)
    assert told.text.count("<script>alert(1)</script>") >= 4, "the reader sees what the name was"
    shown = [
        text for plot in told.plots for trace in plot["data"] for text in (trace["name"], *trace.get("hovertext", []))
    ]
    assert any("&lt;script&gt;" in text for text in shown)
    assert not any("<" in text for text in shown), "plotly reads tags in names"
    assert "\x1b" not in printed(hostile)


# --------------------------------------------------------------------------------------------------- the curves


def test_figure_has_the_points_of_the_chart_and_its_limits() -> None:
    drawn = chart(made.sweep(), "Time to first token against rate")
    plot = figure(drawn)
    assert plot.data[0].x == (2.0, 4.0, 6.0, 7.0, 8.0)
    assert plot.data[2].name == "objective 500 ms"
    assert plot.data[2].y == (0.5, 0.5)


def test_curves_against_history_are_the_medians_of_each_mode() -> None:
    context = made.context()
    drawn = chart(context, "Time to first token against history")
    assert [curve.name for curve in drawn.curves] == ["warm", "restored", "recomputed"]
    for curve in drawn.curves:
        points = [point for point in context.points if point.context == curve.name]
        assert curve.x == tuple(point.history_tokens for point in points)
        assert curve.y == tuple(summarize(context, point).ttft.p50 for point in points)


def test_a_history_of_nothing_has_a_place_on_the_logarithmic_axis() -> None:
    points = [made.point(f"history {n}", n, n + 1, history_tokens=n, context=ContextKind.WARM) for n in (0, 1024, 2048)]
    requests = [made.request(point.start, 0.1, [0.01], index=index) for index, point in enumerate(points)]
    plot = figure(chart(made.results(Experiment.CONTEXT, points, requests), "Time to first token against history"))
    assert plot.data[0].x == (512, 1024, 2048)
    assert plot.layout.xaxis.ticktext == ("0", "1,024", "2,048")


def test_curves_against_streams_are_the_summaries() -> None:
    load = made.concurrency()
    throughput, latency = chart(load, "Throughput against streams"), chart(load, "Latency against streams")
    found = [summarize(load, point) for point in load.points]
    assert throughput.curves[0].y == tuple(summary.token_rate for summary in found)
    assert latency.curves[0].y == tuple(summary.ttft.p99 for summary in found)
    assert latency.curves[2].y == tuple(summary.inter_token.p99 for summary in found)


def test_long_prompts_are_shaded_where_they_waited() -> None:
    drawn = chart(made.mixed(), "Gaps of the running streams")
    assert [(round(s.start, 6), round(s.end, 6)) for s in drawn.spans][:2] == [(2.0, 3.2), (5.0, 6.2)]
    gaps = max(gap for r in made.mixed().requests if r.group == "stream" for gap in r.gaps)
    assert max(drawn.curves[1].y) == gaps, "thinned out, the worst gap is still there"


def test_distribution_is_the_share_of_requests_that_took_no_longer() -> None:
    run = made.run()
    curves = chart(run, "Time to first token").curves
    assert [curve.name for curve in curves] == ["new", "warm", "restored"]
    ordered = sorted(r.time_to_first_token for r in run.requests if r.context is ContextKind.RESTORED)
    for moment, share in list(zip(curves[2].x, curves[2].y, strict=True))[1:]:
        assert share == pytest.approx(bisect_right(ordered, moment) / len(ordered))


def test_curves_that_differ_look_different(results: Results) -> None:
    """No two of a plot share colour, dashes and symbol; a kind of context has one colour in every plot."""
    for drawn in all_charts(results):
        looks = [(trace.line.color, trace.line.dash, trace.marker.symbol) for trace in figure(drawn).data]
        assert len(set(looks)) == len(looks) or len(looks) > 12, drawn.title
    warm = [
        trace.line.color
        for drawn in all_charts(results)
        for trace in figure(drawn).data
        if trace.name in {"warm", "history 256, warm"}
    ]
    assert len(set(warm)) <= 1


def test_distribution_of_many_values_keeps_its_ends() -> None:
    (curve,) = charts.gap_distribution(tables.points(made.run(sessions=100, pieces=50))).curves
    gaps = [gap for r in made.run(sessions=100, pieces=50).requests for gap in r.gaps]
    assert len(curve.x) <= charts.STEPS_OF_ECDF + 1 < len(gaps)
    assert (curve.x[0], curve.x[-1], curve.y[-1]) == (min(gaps), max(gaps), 1.0)


def test_tokens_over_time_add_up_to_all_tokens(results: Results) -> None:
    (curve,) = chart(results, "Tokens out").curves
    widths = [end - begin for begin, end in zip(curve.x, curve.x[1:], strict=False)]
    tokens = sum(width * rate for width, rate in zip(widths, curve.y, strict=False))
    assert tokens == pytest.approx(sum(r.generated_tokens for r in results.requests))


def test_requests_in_flight_begin_and_end_with_none(results: Results) -> None:
    (curve,) = chart(results, "Requests in flight").curves
    assert (curve.y[0], curve.y[-1]) == (0, 0)
    assert min(curve.y) == 0
    assert max(curve.y) >= 1


def test_timeline_draws_waiting_streaming_and_failures() -> None:
    told = [
        made.request(1.0, 0.5, [0.25], user=3),
        made.request(2.0, 0.5, user=4, outcome=Outcome.TIMEOUT, error="late"),
    ]
    drawn = chart(made.results(Experiment.RUN, [made.point("run", 1.0, 2.2)], told), "Requests")
    waiting, streaming, failed = drawn.curves
    assert waiting.x == (1.0, 1.5, None, 2.0, 2.5, None)
    assert streaming.x[:3] == (1.5, 1.75, None)
    assert (failed.x, failed.y, failed.style, failed.hover) == ((2.5,), (4.0,), Style.CROSSES, ("timeout: late",))
    assert [(span.start, span.end) for span in drawn.spans] == [(0.0, 1.0), (2.2, 2.5)], "what was not measured"


@pytest.mark.parametrize("most", [1, 3, 10])
def test_thinning_keeps_the_worst_of_each_stretch(most: int) -> None:
    moments: Sequence[float] = [0.0, 0.1, 0.2, 1.0, 1.1, 9.0]
    values = [1.0, 5.0, 2.0, 3.0, 4.0, 0.5]
    kept = {1: [5.0], 3: [5.0, 0.5], 10: values}
    assert charts.worst_by_window(moments, values, most)[1] == kept[most]


# -------------------------------------------------------------------------------------------------- the command


def test_report_reads_a_file_and_writes_a_page(tmp_path) -> None:
    source, target = tmp_path / "run.json", tmp_path / "run.html"
    source.write_bytes(made.run().to_json())
    result = CliRunner().invoke(app, ["load", "report", str(source), "--html", str(target)])
    assert result.exit_code == 0, result.output
    assert "Time to first token" in result.stdout
    assert Page(target.read_text()).plots


def test_report_says_what_is_wrong_with_a_file(tmp_path) -> None:
    source = tmp_path / "other.json"
    source.write_text("{}")
    result = CliRunner().invoke(app, ["load", "report", str(source)])
    assert result.exit_code == 2
    assert "schema_version is missing" in result.stderr
