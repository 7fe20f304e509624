"""The gRPC service of the orchestrator.

servicer.py  OrchestratorService
file_streams.py  files as streams of pieces
job_kinds.py  the jobs that it does
server.py    the server, from its start to its drain
"""
