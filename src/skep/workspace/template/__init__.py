"""Templates: what a workspace starts from, as a person writes it."""
