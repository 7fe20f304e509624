"""The edge's HTTP server.

process.py         the lifecycle of an edge and its listeners
http_server.py     serves connections, drains and stops
connection.py      the limits of one connection before there is a request
operations.py      what the description of the API says about each route
api_docs.py        GET /openapi.json
http_router.py     the routing table; turns failures into OpenAI errors
wrong_paths.py     what a client is told whose base URL is not the right one
router_metrics.py  metrics of the links to several routers
"""
