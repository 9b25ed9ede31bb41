"""A report as one page that needs nothing but itself: plots, their tables, and the library that draws them.

The page's Content-Security-Policy lets it run the two scripts that were put into it, known by their hashes, and load
nothing at all: neither what plotly would fetch for a map, nor what a hostile name might ask for.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from segue_client.load.report.blocks import Chart, Section
from segue_client.load.report.plots import figure
from segue_client.load.report.sections import sections
from segue_client.load.results import Results

PACKAGE = "segue_client.load.report"


@dataclass(frozen=True)
class _Plot:
    id: str
    chart: Chart
    json: Markup


@dataclass(frozen=True)
class _Part:
    id: str
    section: Section
    plots: Sequence[_Plot]


def page(results: Results) -> str:
    """The HTML document."""
    library, script = get_plotlyjs(), _asset("page.js")
    environment = Environment(
        loader=PackageLoader(PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2").render(
        metadata=results.metadata,
        experiment=results.experiment.value,
        parts=list(_parts(sections(results))),
        style=_own(_asset("page.css")),
        library=_own(library),
        script=_own(script),
        hashes=[_hash(library), _hash(script)],
    )


def _parts(of: Iterable[Section]) -> Iterator[_Part]:
    numbers = count(1)
    for index, section in enumerate(of, start=1):
        plots = [_Plot(f"plot-{next(numbers)}", chart, _json(chart)) for chart in section.charts]
        yield _Part(f"section-{index}", section, plots)


def _json(chart: Chart) -> Markup:
    """Plotly's JSON writes <, > and / as \\u escapes, so that no text can end the script element it stands in."""
    return _own(figure(chart).to_json())


def _own(text: str) -> Markup:
    """Text of this program, not of a measured server."""
    return Markup(text)  # noqa: S704


def _asset(name: str) -> str:
    return files(PACKAGE).joinpath("templates", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """A script's name in a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
