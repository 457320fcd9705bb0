"""Sessions: a conversation bound to its own computer, whatever happens to it."""
