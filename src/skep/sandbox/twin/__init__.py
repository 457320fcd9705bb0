"""The twin: a program that is sent into a sandbox, and the controller's side of the conversation with it.

What is in `inside/` runs in the sandbox with whatever Python is there (3.9 or newer) and nothing but its standard
library. The rest runs here.
"""
