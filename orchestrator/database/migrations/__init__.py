"""Alembic's environment and steps.

env.py     gives Alembic the connection
versions/  the steps
"""
