"""The Python SDK: `kvloom.Client` and what it is made of."""

from kvloom.client.client import Client as Client

__all__ = ["Client"]
