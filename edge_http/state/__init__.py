"""The paths of OpenAI's API whose objects the orchestrator stores.

bodies.py   the bodies of requests
objects.py  the objects, for the OpenAPI document
state_route.py  what the routes have in common
routes.py   the routes: what an operation of the orchestrator is over HTTP
files.py    uploads and downloads
encoders.py  the encoder of a new vector store
vector_routes.py  the routes of vector stores
handler.py  checks a request, and asks the orchestrator
"""
