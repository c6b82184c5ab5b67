# A pair of sockets is allowed, and a datagram can be sent from one to anybody.
import os, socket

one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
try:
    one.sendto(b"hello", "\0" + "{{ABSTRACT}}")
    print("ESCAPED: a datagram to an abstract name")
except OSError as error:
    print(error)
print("DONE")
