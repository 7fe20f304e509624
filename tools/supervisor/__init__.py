"""Runs the processes of a fabric on this machine for `kvloom up`.

fabric.py              one run of a whole fabric
process_specs.py       its processes: arguments, and order of starts, stops and restarts
embedded_redis.py      the Redis-protocol server that `kvloom up` starts
supervisor.py          starts, watches, replaces and stops a set of processes
supervised_process.py  keeps one process running, with backoff
child.py               one operating-system process
exec_bound.py          the wrapper that binds a child to the life of its parent
shared_port.py         a TCP port on which several processes listen
readiness.py           checks whether the fabric is ready
state.py               the run folder: lock, state file, logs
control.py             the socket for commands such as `kvloom restart`
reporters.py           where progress is reported
bounded_log.py         a log file that cannot fill the disk
detach.py              runs a fabric in the background
child_fabric.py        `kvloom up` as a child process, for measurements
"""
