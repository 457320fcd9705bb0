"""Reach out of a sandbox: by allow-list, through one proxy outside that nothing inside can bypass.

    controller                               proxy process                              sandbox
    network.py   what its creator asks for
    passage.py   one sandbox's way out       outlet.py      one sandbox's way out
    door.py      opens sockets inside ------------------>   its sockets   <-- every address, any program
    gate.py      keeps the proxy running     connection.py  whom is it for? TLS, HTTP or other?
    child.py     one run of the proxy  <-->  proxy.py       exchange.py    requests and answers
                 policy, secrets, events     dial.py   --> allowed hosts

A helper opens the sockets inside the sandbox's network namespace and hands them out; the proxy accepts on them from
its own. If it dies, connections fail.
"""
