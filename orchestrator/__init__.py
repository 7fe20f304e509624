"""The orchestrator stores responses, conversations and files, and works at batches. Its processes keep no state
of their own: what they have acknowledged is in the SQL database and the store of files.

Edges ask it (`OrchestratorService`) for requests that name or make stored objects, and for no others.

database/      the tables, and their migrations
store/         objects and items as rows, whatever their kind
files/         the contents of files
search/        chunks and vectors of files, and how they are found
jobs/          work that outlives a process: who does it
batches/       checks batches, and works at them
background/    background responses
webhooks/      what tenants are told at their own URLs
api/           the operations of OpenAI's API on them
service/       the gRPC service and the process
seal.py        encrypts bodies where edges hide personal data
backup.py      copies database and files for `kvloom backup`
metrics.py     its metrics
tracing.py     its spans
__main__.py    the command
"""
