# What waits in sockets is memory of the kernel, which no process shows.
import os, socket, time

filled = 0
for number in range({{CHILDREN}}):
    if number and os.fork() != 0:
        continue
    held = []
    while len(held) < {{PAIRS}}:
        try:
            pair = socket.socketpair()
        except OSError:
            break
        held.append(pair)
        for end in pair:
            end.setblocking(False)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            except OSError:
                pass
            try:
                while True:
                    filled += end.send(bytes(65536))
            except OSError:
                pass
    if number:
        time.sleep({{SECONDS}})
        os._exit(0)
    first = held
time.sleep({{SECONDS}})
if filled >= {{LEAST}} << 20:
    print("ESCAPED:", filled >> 20, "MiB in the sockets of one process")
print("DONE")
