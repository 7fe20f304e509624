"""The gRPC services of control.

control_servicer.py     ControlService: what processes of the fabric ask
directory_servicer.py   DirectoryService: what administrators ask
server.py               the server, from its start to its drain
metrics.py              its metrics
"""
