"""What runs in a sandbox that no descriptor can be handed into: commands, files and connections over one stream."""
