"""The client side of streams between processes: gRPC, and Unix sockets between processes of one machine.

channel_options.py  the options of gRPC channels to routers
grpc_errors.py      errors of the catalogue as gRPC statuses, and back
frame_writer.py     writes the pending messages of a stream, merged into one
local_stream.py     a stream over a Unix socket, with the interface of a gRPC stream
local_frames.py     its wire format
local_socket.py     its socket's name, and which peers are trusted
local_client.py     connects to a local stream
"""
