"""E2B, played on loopback for its unmodified SDK."""
