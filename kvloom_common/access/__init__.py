"""Who may use the fabric from outside: API keys, tenants, TLS for clients, and the rule for listeners that strangers
can reach.

api_keys.py      the keys and their file
auth_provider.py   a plugin that says who a caller is, instead of keys
kv_shares.py     the guaranteed shares of callers in the KV blocks of shards
listener_tls.py  certificates of the HTTP and gRPC listeners, reloaded when their files change
exposure.py      listeners on other addresses than loopback need both TLS and one of the others, or `--insecure`

With tenants (docs/operate/tenancy.md):

identities.py    who a caller is: the holder of a key, a token or a certificate
caller_access.py   what it may use
tenants.py       the table of tenants in use, and whether it is fresh enough
tenant_follower.py   keeps that table the one of `control`
tenant_file.py   the copy of it with which a process starts while `control` is away
tokens.py        tokens of OIDC providers
key_sets.py      the keys with which these providers sign
revoked_certificates.py  those that their authorities have revoked
"""
