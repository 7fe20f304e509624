"""Traces of requests, which are exported over OTLP (docs/operate/traces.md). Nothing here runs while they are off.

trace_context.py  the W3C trace context, and the ids that processes derive from it without telling one another
spans.py          spans, and the rule that decides which are kept. Pure
attributes.py     the names of attributes
tracer.py         sends spans to a collector, by OpenTelemetry's SDK
"""
