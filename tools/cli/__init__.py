"""The `kvloom` command, with one file per command.

entry_point.py    the entry point of the script
commands.py       the command and its subcommands
lazy_group.py     imports a subcommand when it is used
up.py             up and down
config_flags.py   the flags of up that set keys of the configuration
launch.py         launches the fabric for up
status.py         status
restart.py        `kvloom reload` and `kvloom restart`
backup.py         backup and restore
deployment.py     `kvloom doctor deployment`
drain.py          drain, undrain and scale-in
logs.py           logs
incident.py       `kvloom incident capture`
chat.py           chat
explain.py        explain
top.py            top
metrics.py        metrics targets
models.py         models
rollouts.py       `kvloom models rollout`, `rollback` and `history`
compare.py        `kvloom models compare`
secret.py         secret
cache.py         the result caches of the routers
collect_receipts.py  `kvloom receipts collect`
keys.py           keys, and those in a file
tenants/          orgs, projects, users, limits and prices, and keys of tenants
running.py        finds the fabric that a command is about
router_client.py  finds the router for chat and explain
"""
