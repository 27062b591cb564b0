"""The pages of docs/reference/: one module per page, with a function `page`."""
