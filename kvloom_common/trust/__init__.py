"""The fabric's secret, and what proves that a process knows it: processes, records and journals of others are refused.

secret.py         the secret: its text form, the keys that are derived from it, and how it is rotated
fabric_trust.py   what a process proves to others and demands of them; without a secret, nothing
tls_trust.py      TLS on both sides, with the certificates of the moment
shared_secret.py  a process's part in the trust of a fabric, with its secret or an identity
identity.py       what a service has that must not have the secret: a certificate, and keys for its own records
on_behalf.py      how an orchestrator says for whom it sends a request
roles.py          which roles of processes may call which methods
certificates.py   certificates that each process makes for itself from the secret, for TLS between processes
seal.py           how registry records and journal entries are protected; without a secret, not at all
sealing.py        the same with a secret
state_seal.py     how what is kept for long is sealed
"""
