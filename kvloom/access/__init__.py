"""Who may use the fabric from outside: API keys, TLS for clients, and the rule for listeners that strangers can reach.

api_keys.py      the keys and their file
listener_tls.py  certificates of the HTTP and gRPC listeners, reloaded when their files change
exposure.py      listeners on other addresses than loopback need both, or `--insecure`
"""
