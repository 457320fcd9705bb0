"""Carry one prompt to one reply: durably, and healed on the way."""
