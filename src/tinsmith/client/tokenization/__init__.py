"""Text to token ids and back: a model's tokenizer, and the calls that programs make on it."""
