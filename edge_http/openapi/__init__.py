"""The description of the HTTP API as an OpenAPI 3.1 document, made from the types that decode the requests.

route.py       all that is said of one method of one path
parameters.py  the headers and query parameters of requests, and the headers of responses
common_fields.py  what fields mean that many bodies share
schemas.py     JSON Schemas of typed structs, with the descriptions that stand in their source
document.py    the whole document
"""
