"""Some of a process's metrics as text, and such text read again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class _Chosen(Collector):
    def __init__(self, registry: Collector, names: Collection[str]) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterable[Metric]:
        return (family for family in self._registry.collect() if family.name in self._names)


def exposition_of(registry: CollectorRegistry, names: Collection[str]) -> str:
    """The metrics of these names (without suffixes such as _total), in Prometheus' text format. Takes milliseconds."""
    return generate_latest(_Chosen(registry, names)).decode()  # it only collects


def samples_in(text: str) -> Iterator[Sample]:
    """Yields the samples of a text that another process sent. Raises ValueError if it is malformed."""
    for family in text_string_to_metric_families(text):
        yield from family.samples
