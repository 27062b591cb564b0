"""Text to token ids and back: the tokenizer of a model, with Hugging Face's interface."""
