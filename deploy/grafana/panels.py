"""What boards are made of: PromQL from names, panels in one style, and a grid that nobody has to count."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"

DATASOURCE: Json = {"type": "prometheus", "uid": "segue-prometheus"}
INTERVAL = "$__rate_interval"  # at least four scrapes, whatever the zoom
COLUMNS = 24

# Grafana's names of units; what it has no name for is a suffix.
TURNS_PER_SECOND = "suffix: turns/s"
TOKENS_PER_SECOND = "suffix: tok/s"
PER_SECOND = "suffix: /s"
TOKENS = "suffix: tok"
COUNT = "short"
SECONDS = "s"
BYTES = "bytes"
BYTES_PER_SECOND = "binBps"
SHARE = "percentunit"


# ------------------------------------------------------------------------------------------------------------ queries


class Query(NamedTuple):
    """PromQL, and what its lines are called."""

    expr: str
    legend: str


def select(metric: str, **labels: str) -> str:
    """The series of the models and instances chosen on the board; a label's "!x" means anything but x."""
    chosen = ['model=~"$model"', 'instance=~"$instance"']
    chosen += [f'{name}{"!=" if v.startswith("!") else "="}"{v.removeprefix("!")}"' for name, v in labels.items()]
    return f"segue_{metric}{{{', '.join(chosen)}}}"


def total(metric: str, *by: str, **labels: str) -> str:
    """A gauge, summed over instances."""
    return _sum(select(metric, **labels), by)


def rate(metric: str, *by: str, **labels: str) -> str:
    """A counter's growth a second, summed over instances."""
    return _sum(f"rate({select(metric, **labels)}[{INTERVAL}])", by)


def quantile(q: float, metric: str, *by: str) -> str:
    """Of a histogram, over all instances: buckets add up, quantiles do not."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', 'le', *by)})"


def share(part: str, whole: str) -> str:
    """No point, instead of NaN, where there is nothing to have a share of."""
    return f"{part} / ({whole} > 0)"


def quantiles(metric: str, *shares: float) -> list[Query]:
    return [Query(quantile(q, metric), f"p{q * 100:.0f}") for q in shares]


def _sum(series: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({series})" if by else f"sum({series})"


# Shown on both boards.
NOT_EVICTABLE = select("kv_usage_ratio", tier="device")
_KEPT = f"({rate('prompt_tokens_total')} - {rate('prompt_tokens_total', source='computed')})"
REUSED = share(_KEPT, rate("prompt_tokens_total"))
PRESSURE = {0.9: "orange", 0.98: "red"}  # --kv-high-watermark, and the alert SegueCachePressure


# ------------------------------------------------------------------------------------------------------------- panels


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture. `lines` are thresholds, drawn as lines in graphs and as colours in single figures."""

    title: str
    text: str  # what it shows, and what to conclude from it
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat", "heatmap"] = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    lines: Mapping[float, str] = field(default_factory=dict)  # value -> colour
    colours: Mapping[str, str] = field(default_factory=dict)  # legend -> colour
    limit: str = ""  # legend of a line that bounds the others: dashed, never stacked

    def json(self, number: int, x: int, y: int) -> Json:
        look = {"timeseries": _graph, "stat": _stat, "heatmap": _heatmap}[self.kind]
        custom, options = look(self)
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._defaults(custom), "overrides": list(self._overrides())},
            "options": options,
            "targets": [self._target(letter, query) for letter, query in zip("ABCDEFGH", self.queries, strict=False)],
        }

    def _defaults(self, custom: Json) -> Json:
        steps: list[Json] = [{"color": "green", "value": None}]
        steps += [{"color": colour, "value": value} for value, colour in sorted(self.lines.items())]
        by_threshold = self.kind == "stat" and self.lines
        return {
            "unit": self.unit,
            "min": 0,
            "noValue": "none",
            "color": {"mode": "thresholds" if by_threshold else "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": steps},
            "custom": custom,
        }

    def _overrides(self) -> Iterator[Json]:
        for legend, colour in self.colours.items():
            yield _override(legend, color={"mode": "fixed", "fixedColor": colour})
        if self.limit:
            custom: dict[str, Json] = {
                "custom.stacking": {"mode": "none"},
                "custom.fillOpacity": 0,
                "custom.lineStyle": {"fill": "dash", "dash": [8, 6]},
            }
            yield _override(self.limit, color={"mode": "fixed", "fixedColor": "red"}, **custom)

    def _target(self, letter: str, query: Query) -> Json:
        return {
            "refId": letter,
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
            "range": True,
            "format": "heatmap" if self.kind == "heatmap" else "time_series",
        }


def _override(legend: str, **properties: Json) -> Json:
    values: list[Json] = [{"id": name, "value": value} for name, value in properties.items()]
    return {"matcher": {"id": "byName", "options": legend}, "properties": values}


def _graph(panel: Panel) -> tuple[Json, Json]:
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 8,
        "showPoints": "never",
        "spanNulls": False,  # a gap means that nothing was measured
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.lines else "off"},
    }
    options: Json = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return custom, options


def _stat(_: Panel) -> tuple[Json, Json]:
    options: Json = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "value",
    }
    return {}, options


def _heatmap(panel: Panel) -> tuple[Json, Json]:
    options: Json = {
        "calculate": False,  # the buckets are those of the histogram
        "cellGap": 1,
        "cellValues": {"unit": COUNT},
        "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "fill": "dark-orange"},
        "filterValues": {"le": 1e-9},  # nothing happened: no cell
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "unit": panel.unit},
    }
    return {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}, options


# ------------------------------------------------------------------------------------------------------------- boards


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, side by side as far as they fit."""

    title: str
    panels: Sequence[Panel]


def board(uid: str, title: str, description: str, rows: Iterable[Row]) -> Json:
    """A dashboard in Grafana's JSON."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["segue"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "",
        "graphTooltip": 1,  # one crosshair for all panels
        "links": [_link_to_the_others()],
        "annotations": {"list": [_firing_alerts()]},
        "templating": {"list": [_variable("model", ""), _variable("instance", '{model=~"$model"}')]},
        "panels": list(_laid_out(rows)),
    }


def _laid_out(rows: Iterable[Row]) -> Iterator[Json]:
    number, top = 0, 0
    for row in rows:
        number += 1
        grid: Json = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": grid}
        x, y, bottom = 0, top + 1, top + 1
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, bottom
            number += 1
            yield panel.json(number, x, y)
            x, bottom = x + panel.width, max(bottom, y + panel.height)
        top = bottom


def _variable(label: str, narrowed: str) -> Json:
    """A choice of one, several or all values of a label that every server has."""
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values(segue_build_info{narrowed}, {label})", "refId": label},
        "refresh": 2,  # when the time range changes
        "sort": 1,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _link_to_the_others() -> Json:
    """Boards of the same tag, opened at the same time and with the same choices."""
    choices = {"keepTime": True, "includeVars": True, "asDropdown": False, "targetBlank": False}
    link = {"type": "dashboards", "tags": ["segue"], "title": "Segue", "icon": "external link", "url": ""}
    return {**link, **choices}


def _firing_alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Segue.*", alertstate="firing", instance=~"$instance"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}}",
        "step": "15s",
    }
