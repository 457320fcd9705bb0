"""Build the program out of its parts; the only package that knows all of them."""
