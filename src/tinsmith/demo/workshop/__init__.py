"""`tinsmith workshop`: a folder of tiny models and datasets under the names of well-known ones."""
