"""Who may use the fabric from outside: API keys, TLS for clients, and the rule for listeners that strangers can reach.

api_keys.py      the keys and their file
auth_provider.py   a plugin that says who a caller is, instead of keys
listener_tls.py  certificates of the HTTP and gRPC listeners, reloaded when their files change
exposure.py      listeners on other addresses than loopback need both TLS and one of the others, or `--insecure`
"""
