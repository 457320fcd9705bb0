"""Skep's state: the database, the event log, leases, accounts and hives."""
