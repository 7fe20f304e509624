"""Prometheus metrics: what all processes share, so that the figures of a fleet can be scraped and added up.

table.py         records of metrics, of which their objects and docs/reference/metrics.md are made
series.py        counters and histograms that are cheap to update from one thread
tenant_table.py  how current the table of tenants of a process is
targets.py       which processes serve /metrics, for Prometheus' service discovery
server.py        the listener of /metrics of processes other than edges
exporter.py      both of these, for one process
exposition.py    some of the metrics as text, and read again
"""
