"""Who may use the fabric, and how much: what administrators see and change. Each function is one method of
DirectoryService, inside a transaction that its caller opens.

actor.py           who acts, and what they may see and change
names.py           which names, times, scopes, models and priority classes are valid. Pure
accounts.py        how organisations, projects and keys are found, listed and shown
account_limits.py  limits as they are stored, and those in force: the tier's, the operator's and an administrator's.
    Pure
operator_settings.py  what the operator has set, which administrators can only make stricter. Pure
kv_shares.py       the guaranteed shares of KV blocks, which have a bound together
priority_classes.py  the priority classes that organisations, projects and keys may name. Pure
quotas.py          how much of the directory an organisation may take
pages.py           lists in pages
transaction.py     a transaction with its audit entries and the next version of the table
organisations.py   organisations
projects.py        projects
users.py           users and their roles
keys.py            keys and identities
tiers.py           tiers of limits
prices.py          prices
audit_log.py       the list of what was changed
methods.py         all methods by their names
"""
