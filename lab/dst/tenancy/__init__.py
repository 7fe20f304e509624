"""Tenants with limits and budgets, for simulations.

hostile.py     a tenant whose clients claim what suits them
sim_limits.py  their table, the owners of their limits, and the faults of both
"""
