"""Types to bytes and back: the contract that client and server share.

`endpoints` lists the routes, `exchange` makes and reads one call, `json_format` and `proto_format`
are the two formats, `content` compression, `sse` streams, `failures` errors, `retry_after` delays,
`limits` how much memory any of it may take. No I/O anywhere.
"""
