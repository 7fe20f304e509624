"""Leases of shared limits: the router's shell around `router/core/tenancy`. Nothing here makes a request wait longer
than the core allows.

rate_leases.py    asks Redis
budget_leases.py  asks the control service
lease_client.py   sends what the core wants to the one that has it, and counts
"""
