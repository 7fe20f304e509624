"""The tables of control's SQL database (kvloom_common/database/ has the connections).

schema.py       the tables of the directory: organisations, projects, users, keys, limits, prices, audit, changes
usage_tables.py   the tables of usage and budgets
migrate.py      brings a database to the schema of this version when the process starts
migrations/     the steps of that, one file each (Alembic)
"""
