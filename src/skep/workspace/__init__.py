"""What an agent works in: templates, snapshots, workspaces, packages, health and archives."""
