"""/admin/v1: administers organisations, projects, users, keys, limits and prices, in a fabric with tenants. Each path
is a method of DirectoryService, which `control` serves.

routes.py      which path is which method. Pure
handler.py     answers administrators


Only a fabric with tenants loads the others:

calls.py       makes the request of the method of a path, a query and a body, and calls it
operations.py  what the OpenAPI document says
"""
