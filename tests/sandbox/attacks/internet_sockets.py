import socket

for family, kind in (
    (socket.AF_INET, socket.SOCK_STREAM),
    (socket.AF_INET6, socket.SOCK_DGRAM),
    (socket.AF_UNIX, socket.SOCK_STREAM),
    (socket.AF_NETLINK, socket.SOCK_RAW),
):
    try:
        socket.socket(family, kind).close()
        print("ESCAPED: a socket of family", family)
    except OSError as error:
        print(error)
print("DONE")
