"""The HTTP edge of the service: sockets, and the server that reads requests from them."""
