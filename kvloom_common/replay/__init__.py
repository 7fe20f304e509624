"""The replay of answers to clients that come back: shared by the edge (SSE streams) and the router (gRPC streams).

event_log.py          the events of one answer that can still be replayed, within a memory budget
reader_slot.py        the one reader of an answer, and the grace period while it has none
stream_retention.py   which answers are kept, and which lose their events first
"""
