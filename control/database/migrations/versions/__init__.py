"""The steps, in their order.

r0001_directory.py      organisations, projects, users, keys, limits, prices, audit, and the log of changes
r0002_usage.py          usage records and their sums, spending, leases and alerts of budgets
r0003_lease_numbers.py  the last change of each lease of a budget
r0004_priority_classes.py  the priority classes that organisations, projects and keys may name
r0005_usage_by_class.py  sums of usage by priority class
r0006_quotas_and_used_ids.py  quotas of organisations, and ids that were used once
r0007_key_accounts.py  which keys continue the limits of a key that they have replaced
r0008_operator_settings.py  what the operator has set of projects, keys and users
r0009_identities_of_projects.py  identities that have no key are those of one project each
r0010_residency.py      the cells in which the requests of organisations and projects may be computed
r0011_guardrails.py     the rules of the safety policy that projects have chosen
"""
