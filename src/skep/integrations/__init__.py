"""Skep inside other frameworks; each module imports the one that it is named for, and nothing else imports it."""
