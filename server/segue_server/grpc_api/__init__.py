"""The gRPC transport: translates protos to the service's words and back, checks form only, and holds no state."""
