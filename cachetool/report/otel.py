"""The metrics of a cache for OpenTelemetry, sent by its SDK. Address, headers and interval come from the environment:
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_METRIC_EXPORT_INTERVAL`` and the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cachetool.core.errors import without
from cachetool.report.metrics import Metric, metrics

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
except ModuleNotFoundError as error:
    raise without("opentelemetry", "otel", error) from None

__all__ = ["sending"]

_SAME = 1.0
"""Seconds for which one look at the catalog is used."""


@contextmanager
def sending(look: Callable[[], Mapping[str, Any]]) -> Iterator[Callable[[], None]]:
    """Send the metrics of ``look()``, the dict form of ``Stats``, until the ``with`` block ends.

    Yields a function that looks for metrics that were not there before; call it now and then.
    """
    provider = MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
    meter = provider.get_meter("cachetool")
    known = set[str]()
    seen: tuple[float, dict[str, Metric]] = 0.0, {}

    def found() -> dict[str, Metric]:
        # The SDK asks for one metric after another. One look at the catalog serves all of them.
        nonlocal seen
        if not seen[1] or time.monotonic() - seen[0] > _SAME:
            seen = time.monotonic(), {metric.name: metric for metric in metrics(look())}
        return seen[1]

    def of(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def values(_: CallbackOptions) -> Iterable[Observation]:
            metric = found().get(name)
            return [] if metric is None else [Observation(value, labels) for labels, value in metric.values]

        return values

    def add(metric: Metric) -> None:
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(metric.name.removesuffix("_total"), callbacks=[of(metric.name)], description=metric.help)

    def again() -> None:
        for metric in found().values():
            if metric.name not in known:
                known.add(metric.name)
                add(metric)

    again()
    try:
        yield again
    finally:
        # Sends a last time.
        provider.shutdown()
