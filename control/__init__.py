"""The owner of tenants, keys, limits, prices, budgets and usage: the one process with the SQL database.

Edges and routers follow its table (`ControlService.Follow`) and serve without it; nothing on the request path asks it.

database/   the SQL database: connections, tables, migrations
"""
