"""The server side of streams between processes: gRPC, and Unix sockets between processes of one machine.

grpc_settings.py    settings that gRPC reads from the environment when it is imported
standard_services.py  health checks and reflection, beside a server's own service
checked_server.py   answers malformed messages with INVALID_ARGUMENT
plain_messages.py   messages as values of JSON, and back
public_addresses.py  HTTP calls to addresses that an operator or a client has given
local_server.py     serves local streams
"""
