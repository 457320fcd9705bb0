"""HTTP in, events out. FastAPI is loaded with `skep.gateway.api` and by nothing else."""
