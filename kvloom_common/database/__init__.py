"""The SQL database of a service: SQLite by default, PostgreSQL by URL. Only control and the orchestrator have one.

database.py     connections and transactions
backup.py       copies all rows to a file, and back
backup_command.py  has a service do so in a process of its own
opening.py      opens and migrates it when a service starts
"""
