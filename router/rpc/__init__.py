"""Guards every RPC: who may call, and how much at a time.

own_rpcs.py       the RPCs of kvloom's own services, as interceptors see them
api_key_check.py  refuses RPCs without a valid API key
provider_check.py  refuses RPCs whose caller an auth provider does not know
certificate_check.py  refuses RPCs of clients whose certificate was revoked
tenant_check.py   refuses RPCs of those who belong to no tenant
access_log.py     a log line for every RPC that ends
limits.py         what one caller, one address and all together may hold over gRPC
receipts.py       which requests are being received, and which of them gives way
"""
