"""Tenants of a run: users with keys, limits and budgets, an operator who changes them meanwhile, and what must hold.

tenancy.py     all of this together
population.py  the tenants, with their keys and limits
control.py     asks the control service, which may be away
operator.py    revokes keys and changes limits during the run
hostile.py     a tenant that claims what suits it
trespass.py    uses revoked keys, and asks for answers of other tenants
judgement.py   compares what was metered, charged and served with what may have been; pure
"""
