"""Streams between processes: gRPC, and Unix sockets between processes of one machine.

channel_options.py  the options of gRPC channels to routers
grpc_settings.py    settings that gRPC reads from the environment when it is imported
standard_services.py  health checks and reflection, beside a server's own service
checked_server.py   answers malformed messages with INVALID_ARGUMENT
grpc_errors.py      errors of the catalogue as gRPC statuses, and back
plain_messages.py   messages as values of JSON, and back
frame_writer.py     writes the pending messages of a stream, merged into one
local_stream.py     a stream over a Unix socket, with the interface of a gRPC stream
local_frames.py     its wire format
local_socket.py     its socket's name, and which peers are trusted
local_client.py     connects to a local stream
local_server.py     serves local streams
"""
