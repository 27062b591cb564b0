"""What stands in docs/reference/: one module for each page, with a function `page`."""
