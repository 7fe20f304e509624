"""The owner of tenants, keys, limits, prices, budgets and usage: the one process with the SQL database.

Edges and routers follow its table (`ControlService.Follow`) and serve without it; nothing on the request path asks it.

database/      the SQL database: connections, tables, migrations
backup.py      copies the database for `kvloom backup`
directory/     organisations, projects, users, keys, limits and prices: what administrators see and change
replication/   the table that edges and routers follow
usage/         what was used, and what may still be used
metric_table.py  the metrics, one record each
service/       the gRPC services and the process
__main__.py    the command
"""
