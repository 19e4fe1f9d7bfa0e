"""The shuffler's traces as a collector would see them."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from riffle.common.process.tracing import ALLOWED, use_provider
from tests.shuffler.conftest import Api
from tests.shuffler.world import user


def test_spans_name_nobody(api: Api) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with use_provider(provider):
        batch = api.deposit()
        api.fill(batch)
        api.finish(batch)
    spans = exporter.get_finished_spans()
    provider.shutdown()
    assert {"request", "store", "permute"} == {found.name for found in spans}
    assert {name for found in spans for name in found.attributes or {}} <= ALLOWED
    text = "".join(found.to_json() for found in spans)
    for name in (api.node_id, api.token, user(0), batch.batch_id):
        assert name not in text


def test_a_global_tracer_gets_nothing(api: Api, elsewhere: InMemorySpanExporter) -> None:
    """The framework would give it paths, callers' addresses and the text of exceptions."""
    batch = api.deposit()
    api.fill(batch)
    assert api.client.get("/nowhere").status_code == 404
    assert elsewhere.get_finished_spans() == ()
