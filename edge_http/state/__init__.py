"""The paths of OpenAI's API whose objects the orchestrator stores.

bodies.py   the bodies of requests
objects.py  the objects, for the OpenAPI document
routes.py   the routes: what an operation of the orchestrator is over HTTP
files.py    uploads and downloads
handler.py  checks a request, and asks the orchestrator
"""
