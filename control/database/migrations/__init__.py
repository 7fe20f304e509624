"""The steps from an empty database to the schema of this version.

env.py      what Alembic runs them with
versions/   the steps, each with its way back; `down_revision` names the one before it
"""
