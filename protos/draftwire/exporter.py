"""Metrics over HTTP for Prometheus: `metric_table` filled with a service's readings at each scrape.

Knows prometheus-client (the `serve` extra; imported only when `--metrics-listen` is set) and the
table. Does not know what is counted or by whom.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from draftwire import logs
from draftwire.addresses import split_host_port
from draftwire.config import ConfigError
from draftwire.errors import InvalidArgument
from draftwire.health import HealthService
from draftwire.meters import Distribution, Reading
from draftwire.metric_table import OTHER, PROCESS, Metric, of_service
from draftwire.rpc_meter import RpcMeter

Source = Callable[[], Iterable[Reading]]


class TableCollector:
    """A prometheus-client collector of one service's rows; `sources` are read at each scrape.

    A reading that is not in the table, or whose label has a value that is not, raises: tests scrape
    every metric, so that an unknown name never leaves this repository.
    """

    def __init__(self, service: str, sources: Iterable[Source]) -> None:
        self._rows = {m.name: m for m in of_service(service) if m not in PROCESS}
        self._sources = list(sources)

    def describe(self) -> list[Any]:
        """Nothing: prometheus-client would otherwise scrape to find the names."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family a row, in the table's order; rows without a reading only if they are not
        sparse.
        """
        from prometheus_client import core

        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        found = self._read()
        for name, metric in self._rows.items():
            values = found.get(name, {})
            if metric.sparse and not values:
                continue
            if not metric.sparse and metric.kind == "counter":
                values = {labels: values.get(labels, 0.0) for labels in _all_labels(metric)}
            family = kinds[metric.kind](name, metric.help, labels=metric.label_names)
            for labels, value in values.items():
                if isinstance(value, Distribution):
                    family.add_metric(labels, value.cumulative(), value.total)
                else:
                    family.add_metric(labels, value)
            yield family

    def _read(self) -> dict[str, dict[tuple[str, ...], float | Distribution]]:
        found: dict[str, dict[tuple[str, ...], float | Distribution]] = {}
        for reading in itertools.chain.from_iterable(source() for source in self._sources):
            metric = self._rows[reading.name]
            labels = _checked(metric, reading.labels)
            values = found.setdefault(reading.name, {})
            if isinstance(reading.value, Distribution):
                if metric.kind != "histogram" or labels in values:
                    raise ValueError(f"{reading.name}{labels}: one distribution, of a histogram")
                values[labels] = reading.value
            else:
                before = values.get(labels, 0.0)
                assert not isinstance(before, Distribution)
                values[labels] = before + reading.value  # several may have become "other"
        return found


def _checked(metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has labels {metric.label_names}, got {labels}")
    checked = []
    for (name, _), value in zip(metric.labels, labels, strict=True):
        allowed = metric.allowed(name)
        if value not in allowed:
            if OTHER not in allowed:
                raise ValueError(f"{metric.name}: {name} is {value!r}, not one of {allowed}")
            value = OTHER
        checked.append(value)
    return tuple(checked)


def _all_labels(metric: Metric) -> Iterator[tuple[str, ...]]:
    return itertools.product(*(metric.allowed(name) for name in metric.label_names))


class Exporter:
    """The HTTP server of one service's metrics; close it, or use it in `with`."""

    def __init__(self, service: str, sources: Iterable[Source]) -> None:
        self._service = service
        self._sources = [self._guarded(source) for source in sources]
        self._server: Any = None
        self._thread: Any = None
        self._log = logs.get_logger("draftwire.metrics")

    def open(self, listen: str) -> str:
        """Serve on "host:port" (port 0: a free one); returns the URL. Raises ConfigError for an
        address that is wrong or taken and for a missing prometheus-client.
        """
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
        except ImportError as error:
            raise ConfigError(
                "--metrics-listen",
                listen,
                "left out, or prometheus-client installed (draftwire[serve])",
            ) from error
        try:
            host, port = split_host_port(listen)
        except InvalidArgument as error:
            raise ConfigError("--metrics-listen", listen, "host:port") from error
        registry = CollectorRegistry()
        registry.register(TableCollector(self._service, self._sources))
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "--metrics-listen", listen, f"an address of this host that is not in use ({error})"
            ) from error
        return f"http://{listen.rpartition(':')[0]}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving; the port is free afterwards."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _guarded(self, source: Source) -> Source:
        """A source that breaks costs the scrape (HTTP 500, `up` is 0) and is named in the log."""

        def read() -> list[Reading]:
            try:
                return list(source())
            except Exception:
                with contextlib.suppress(Exception):
                    self._log.exception("metrics cannot be read")
                raise

        return read


def service_exporter(service: Any, meter: RpcMeter, healthy: HealthService) -> Exporter:
    """The exporter of a runtime's service: its own readings, its calls, its health."""

    def health() -> list[Reading]:
        return [Reading("draftwire_serving", float(healthy.serving))]

    sources: list[Source] = [health, meter.readings]
    if hasattr(service, "readings"):
        sources.append(service.readings)
    return Exporter(service.service_names[0].rpartition(".")[2].lower(), sources)
