"""The Python kernel: runs cells that it gets on standard input, a socket, and keeps their variables between them.

It runs inside the sandbox with whatever Python the workspace has (3.10 or newer), so it uses the standard library
alone, and imports all of it before the first cell: later a file of the workspace could stand in for it.
"""
