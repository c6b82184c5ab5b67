# The memory of pipes is counted for all runs of a user; urgent bytes are a rarely used, thinly tested part of sockets.
import fcntl, os, socket


def attempt(what, action):
    try:
        action()
        print("ESCAPED:", what)
    except OSError as error:
        print(what, error)


reader, writer = os.pipe()
left, right = socket.socketpair()
attempt("a larger pipe", lambda: fcntl.fcntl(writer, 1031, 1 << 18))
attempt("the size of a pipe", lambda: fcntl.fcntl(writer, 1032))
attempt("an urgent byte", lambda: left.send(b"x", socket.MSG_OOB))
attempt("an urgent message", lambda: left.sendmsg([b"x"], [], socket.MSG_OOB))
print("DONE")
