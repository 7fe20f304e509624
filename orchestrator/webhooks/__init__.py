"""Webhooks: what tenants are told at their own URLs, signed as standardwebhooks.com describes it.

outbox.py    what is still to be sent, written together with what it tells of
endpoint.py  an endpoint: its URL, and its secrets
caller.py    sends one message, to public addresses only
delivery.py  works at one delivery
"""
