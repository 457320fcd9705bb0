"""Model providers: which model answers what, one call at a time, and what it cost."""
