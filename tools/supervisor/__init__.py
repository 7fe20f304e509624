"""Runs the processes of a fabric on this machine for `kvloom up`.

fabric.py              one run of a whole fabric, or of a machine's part of a fleet
process_specs.py       its processes: arguments, and order of starts, stops and restarts
flag_model.py          what the flag --model says
adapter_changes.py     loads and unloads adapters of models while the processes run
model_changes.py       loads, unloads, puts to sleep and wakes models while the processes run
model_versions.py      the two versions of a model that a rollout loads and unloads
model_history.py       what has happened to the models
rollout/               a rollout of a new version of a model: steps, figures, judgement
rollout_commands.py    begins, follows and takes back the rollouts of this machine
config_changes.py      which keys two configurations differ in, and what applies each
config_reload.py       applies a changed configuration file while the processes run
embedded_redis.py      the Redis-protocol server that `kvloom up` starts
supervisor.py          starts, watches, replaces and stops a set of processes
supervised_process.py  keeps one process running, with backoff
child.py               one operating-system process
exec_bound.py          the wrapper that binds a child to the life of its parent
shared_port.py         a TCP port on which several processes listen
free_ports.py          picks ports that nothing listens on
readiness.py           checks whether the fabric is ready
fleet_records.py       what the registry says about the whole fleet
free_ports.py          finds ports for processes that start a moment later
joining.py             what a machine checks and completes before it joins a fleet
bindings.py            what the processes listen on, for people
state.py               the run folder: lock, state file, logs
service/               SupervisorService, for commands such as `kvloom restart`, and its client
logs/                  how the processes' logs are written and read
reporters.py           where progress is reported
detach.py              runs a fabric in the background, and says whether one has a terminal
child_fabric.py        `kvloom up` as a child process, for measurements
"""
