"""Keep workspaces outside this machine: encrypted, incremental, complete or not there at all."""
