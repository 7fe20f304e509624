import kvloom.grpc_settings as _  # noqa: F401  (before anything imports gRPC)
