"""The edge's HTTP server.

process.py         the lifecycle of an edge and its listeners
http_server.py     serves connections, drains and stops
connection.py      the limits of one connection before there is a request
routes.py          the routes: one record for each method of each path
api_docs.py        GET /openapi.json
http_router.py     the routing table; turns failures into OpenAI errors
"""
