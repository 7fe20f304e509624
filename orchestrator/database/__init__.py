"""The orchestrator's SQL database (kvloom_common/database/ has the connections).

schema.py    the tables
migrations/  the steps that make them, one file each (Alembic)
"""
