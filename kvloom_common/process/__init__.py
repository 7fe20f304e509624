"""Every service process needs these: start and stop, logs, metrics, timers, and small policies.

service.py        uvloop, signals, the ready line, the gRPC server's port, health and reflection
ready_line.py     the lines by which a process tells its parent how it is
quick_start.py    imported first by every entry point, for a quick start
log_lines.py     sets up logs: renderers of log lines, and the writer that batches them
request_context.py  the request that a task works for, whose names are in the task's log lines
access_log.py    which ends of requests are logged, and failures that may occur at the rate of requests
aligned_timer.py  runs all periodic work of a process at the same moment
control_socket.py  where the supervisor of a machine takes commands
freed_memory.py   returns freed memory to the system
cpu_affinity.py   keeps an event loop's thread on one CPU
cancellation.py   restores task cancellations that a library has swallowed
data_dir.py       what a data directory holds, for its user alone
watched_files.py  reads files again when they change
extras.py         names the distribution that brings a missing package
"""
