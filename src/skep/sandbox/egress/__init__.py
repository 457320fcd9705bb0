"""Reach out of a sandbox: by allow-list, through one proxy outside that nothing inside can bypass.

    controller                      proxy process                     sandbox
    gate.py  -- policy, sockets --> proxy.py  <-- every address --    any program
             <- events, secrets? -- dial.py   --> allowed hosts       (no route, no resolver of its own)

A helper opens the sockets inside the sandbox's network namespace and hands them out; the proxy accepts on them from
its own. If it dies, connections fail.
"""
