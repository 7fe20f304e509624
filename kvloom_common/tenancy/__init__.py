"""Tenants, as every process knows them: who may use what, how much of it, and at which price. All of it is pure.

scopes.py         what a key may be used for, and which roles may give it out
class_rights.py   which priority classes an organisation, a project or a key may name
principal.py      who makes a request, and what it may be used for
limits.py         how much an account may use
prices.py         what a request costs
usage_record.py   what is known of a request once it has ended: the unit of metering
answer_runs.py    which runs of one answer continue each other, where only its client says it
usage_stream.py   how records of usage go from routers to the control service
sliced_dict.py    a large dictionary that neither grows nor goes at once
table.py          the tenants, keys, limits and prices of a fabric, looked up without a database
"""
