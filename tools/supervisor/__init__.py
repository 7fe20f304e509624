"""Runs the processes of a fabric on this machine for `kvloom up`.

fabric.py              one run of a whole fabric, or of a machine's part of a fleet
fabric_commands.py     the commands on it, one at a time
fabric_readiness.py    whether it is complete and serves
process_specs.py       its processes: arguments, and order of starts, stops and restarts
flag_model.py          what the flag --model says
models/                loads and unloads models and adapters while the processes run, and their history
rollout/               a rollout of a new version of a model: steps, figures, judgement
config_changes.py      which keys two configurations differ in, and what applies each
config_reload.py       applies a changed configuration file while the processes run
embedded_redis.py      the Redis-protocol server that `kvloom up` starts
supervisor.py          starts, watches, replaces and stops a set of processes
supervised_process.py  keeps one process running, with backoff
spares.py              a spare for the only shard of a model while that is restarted
child.py               one operating-system process
die_with_parent.py          the wrapper that binds a child to the life of its parent
shared_port.py         a TCP port on which several processes listen
readiness.py           checks whether the fabric is ready
named_models.py        models that the configuration names and that nothing serves
tenant_tables.py       which edges and routers do not follow the table of tenants
fleet_records.py       what the registry says about the whole fleet
fleet_registry.py      reads it
joining.py             what a machine checks and completes before it joins a fleet
bindings.py            what the processes listen on, for people
state.py               the run folder: lock, state file, logs
service/               SupervisorService, for commands such as `kvloom restart`, and its client
logs/                  how the processes' logs are written and read
reporters.py           where progress is reported
detach.py              runs a fabric in the background, and says whether one has a terminal
child_fabric.py        `kvloom up` as a child process, for measurements
"""
