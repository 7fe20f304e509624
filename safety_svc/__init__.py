import kvloom.transport.grpc_settings as _  # noqa: F401  (before anything imports gRPC)
