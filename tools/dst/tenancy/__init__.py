"""Tenants with limits and budgets, for simulations.

lease_owners.py  Redis' rates and slots and control's budgets, exactly as the real ones decide
"""
