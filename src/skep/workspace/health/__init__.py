"""Look at everything that can be wrong with a workspace, and put it right."""
