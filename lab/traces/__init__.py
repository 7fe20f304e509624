"""Traces as a collector gets them.

collector.py   a collector of OpenTelemetry's protocol, which keeps what it gets
picture.py     a trace as text and as SVG
command.py     `kvloom-lab trace`: asks a running fabric one question and shows its trace
"""
