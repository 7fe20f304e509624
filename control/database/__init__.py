"""The SQL database of control: SQLite by default, PostgreSQL by URL.

url.py          which database, from the configuration
database.py     connections and transactions
failures.py     what a caller is told when it fails
schema.py       the tables of the directory: organisations, projects, users, keys, limits, prices, audit, changes
usage_tables.py   the tables of usage and budgets
migrate.py      brings a database to the schema of this version when the process starts
migrations/     the steps of that, one file each (Alembic)
"""
