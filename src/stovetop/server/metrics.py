"""`/metrics`: what Prometheus asks for, in either of its text formats. What a server counts is in `activity.py`."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from stovetop.concurrency import in_thread
from stovetop.server.activity import BUCKETS_S, Activity
from stovetop.server.overview import Overview, Tenant, look_at
from stovetop.server.protocol import Answer, Asked
from stovetop.server.recovery import Parts


async def metrics(parts: Parts, asked: Asked) -> Answer:
    encode, media_type = choose_encoder(asked.accept)
    return Answer(await in_thread(partial(_written, parts, encode)), media_type)


def _written(parts: Parts, encode: Callable[[CollectorRegistry], bytes]) -> bytes:
    """The registry is made for one answer: nothing is counted in it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Families(families(look_at(parts), parts.activity)))
    return encode(registry)


class _Families(Collector):
    """What is there already."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        return self._found


def families(overview: Overview, activity: Activity) -> Iterable[Metric]:
    """All that a server says of itself, but for its process."""
    per_owner: list[tuple[str, str, Callable[[Tenant], float]]] = [
        ("sessions", "Sessions that are alive", lambda tenant: tenant.num_sessions),
        ("queued_requests", "Requests that are not done", lambda tenant: tenant.load.num_requests),
        ("queued_tokens", "Tokens that these compute and draw at most", lambda tenant: tenant.load.num_tokens),
        ("checkpoint_bytes", "Of checkpoints", lambda tenant: tenant.checkpoint_bytes),
    ]
    for name, words, value_of in per_owner:
        gauge = GaugeMetricFamily(f"stovetop_{name}", words, labels=["owner"])
        for tenant in overview.tenants:
            gauge.add_metric([tenant.name], value_of(tenant))
        yield gauge
    adapters = GaugeMetricFamily("stovetop_adapters", "Training clients, by where they are", labels=["owner", "place"])
    for tenant in overview.tenants:
        adapters.add_metric([tenant.name, "memory"], tenant.adapters.num_in)
        adapters.add_metric([tenant.name, "disk"], tenant.adapters.num_out)
    yield adapters
    samplers = GaugeMetricFamily("stovetop_samplers", "Sampling clients, by where they are", labels=["place"])
    samplers.add_metric(["memory"], overview.samplers.num_in)
    samplers.add_metric(["disk"], overview.samplers.num_out)
    yield samplers
    yield GaugeMetricFamily("stovetop_models", "Base models that are served", value=len(overview.models))
    yield GaugeMetricFamily("stovetop_journal_bytes", "Of the journal", value=overview.disk.journal_bytes)
    yield GaugeMetricFamily("stovetop_disk_free_bytes", "Where the server stores", value=overview.disk.free_bytes)
    yield from _counted(activity)


def _counted(activity: Activity) -> Iterable[Metric]:
    """Since the server started."""
    tokens = CounterMetricFamily("stovetop_tokens", "Trained on, scored and drawn", labels=["owner"])
    steps = CounterMetricFamily("stovetop_steps", "Steps of optimizers", labels=["owner"])
    for owner, done in activity.by_owner().items():
        tokens.add_metric([owner], done.num_tokens)
        steps.add_metric([owner], done.num_steps)
    yield tokens
    yield steps
    requests = CounterMetricFamily(
        "stovetop_requests", "That have ended: ok, or by whose fault they failed", labels=["owner", "verb", "outcome"]
    )
    for labels, num in activity.counts().items():
        requests.add_metric(list(labels), num)
    yield requests
    seconds = HistogramMetricFamily(
        "stovetop_request_seconds", "From when a request was accepted until it had ended", labels=["verb"]
    )
    for verb, (counts, sum_s) in activity.times().items():
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        seconds.add_metric([verb], list(zip(bounds, accumulate(counts), strict=True)), sum_s)
    yield seconds
