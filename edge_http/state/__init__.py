"""The paths whose objects the orchestrator stores.

bodies.py   the bodies of requests
objects.py  the objects, for the OpenAPI document
routes.py   the routes of OpenAI's API: what an operation of the orchestrator is over HTTP
own_routes.py  those that OpenAI's API does not have
state_route.py  what all of them have in common
files.py    uploads and downloads
encoders.py  the encoder of a new vector store
erased_tenant.py  whose objects an erasure concerns
vector_routes.py  the routes of vector stores
handler.py  checks a request, and asks the orchestrator
"""
