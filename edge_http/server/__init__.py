"""The edge's HTTP server.

process.py         the lifecycle of an edge and its listeners
http_server.py     serves connections, drains and stops
connection.py      the limits of one connection before there is a request
http_router.py     the routing table; turns failures into OpenAI errors
router_metrics.py  metrics of the links to several routers
"""
