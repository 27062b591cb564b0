"""Types to bytes and back: the protocol that client and server share. No I/O.

`endpoints` lists the endpoints; `exchange` encodes and decodes the request and response of a call;
`json_format`, `proto_format` and `packed_format` are the formats of bodies; `content` compresses
them; `sse` is event streams; `failures` maps errors to statuses; `retry_after` reads and writes
delays; `decode_limits` bounds the memory of decoding.
"""
