"""A link that outlives the connections that carry it.

The process interface of a cloud passes output on to whoever listens and forgets it: what a program prints while a
connection is being replaced, or a machine is halted, is lost. So the twin is not talked to directly. `inside` is a
small program that runs beside it, numbers its bytes, and keeps them until they have been acknowledged; `RelayedLink`
does the same here, and the two repeat what the other has missed.
"""
