"""What `make test-schemathesis` needs: requests that are made up from /openapi.json, against an edge in a process.

serve_edge.py  the edge, with a fake router and any model
"""
