"""Prometheus families from plain numbers: a prefix, constant labels, and values by the rest of the labels."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from segue_server.stats import Histogram

Key = tuple[str, ...]  # label values


class Families:
    """Makes families whose names begin with `prefix` and whose samples carry the labels `constant`."""

    def __init__(self, prefix: str, constant: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._names = tuple(constant)
        self._values = tuple(constant.values())

    def counters(self, name: str, text: str, values: Mapping[Key, float], *labels: str) -> Metric:
        """`name` without _total."""
        return self._fill(CounterMetricFamily(self._prefix + name, text, labels=[*labels, *self._names]), values)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self.counters(name, text, {(): value})

    def gauges(self, name: str, text: str, values: Mapping[Key, float], *labels: str) -> Metric:
        return self._fill(GaugeMetricFamily(self._prefix + name, text, labels=[*labels, *self._names]), values)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, {(): value})

    def histograms(self, name: str, text: str, values: Mapping[Key, Histogram], *labels: str) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=[*labels, *self._names])
        for key, histogram in values.items():
            family.add_metric([*key, *self._values], buckets(histogram), histogram.total)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        return self.histograms(name, text, {(): histogram})

    def _fill(self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Key, float]) -> Metric:
        for key, value in values.items():
            family.add_metric([*key, *self._values], value)
        return family


def buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(edge, observations up to it), the last edge being +Inf."""
    counts = list(histogram.counts)  # one copy, so that buckets and count agree
    found: list[tuple[str, float]] = []
    total = 0
    for edge, count in zip((*histogram.edges, float("inf")), counts, strict=True):
        total += count
        found.append((edge_name(edge), total))
    return found


def edge_name(value: float) -> str:
    """As prometheus_client writes the label `le`."""
    return "+Inf" if value == float("inf") else repr(float(value))
