"""The door of a server; a folder that is a package lets go of its server with its last test."""
