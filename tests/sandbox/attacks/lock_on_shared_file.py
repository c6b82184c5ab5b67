# Runs share the files of the system. A lock or a notice on one would be seen by another run.
import fcntl, os, signal, struct, threading

RECORD = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
signal.signal(signal.SIGIO, signal.SIG_IGN)


def attempt(what, action):
    try:
        action()
        print("ESCAPED:", what)
    except OSError as error:
        print(what, error)


file = open(os.__file__)
null = os.open("/dev/null", os.O_RDWR)
folder = os.open(os.path.dirname(os.__file__), os.O_RDONLY)
attempt("a lock on a file", lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt("a record lock", lambda: fcntl.fcntl(file, fcntl.F_SETLK, RECORD))
attempt("a look at record locks", lambda: fcntl.fcntl(file, fcntl.F_GETLK, RECORD))
attempt("a lock of an open file", lambda: fcntl.fcntl(file, 37, RECORD))
attempt("a lock on a device", lambda: fcntl.lockf(null, fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt("notices of a folder", lambda: fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS))

# With two threads the file could be another one by the time it is locked.
own = os.open("own", os.O_RDWR | os.O_CREAT)
stop = threading.Event()


def exchange():
    while not stop.is_set():
        os.dup2(file.fileno(), target)
        os.dup2(own, target)


target = os.dup(own)
thread = threading.Thread(target=exchange)
thread.start()
for _ in range(300):
    try:
        fcntl.flock(target, fcntl.LOCK_SH | fcntl.LOCK_NB)
        print("ESCAPED: a lock on a file that was exchanged meanwhile")
        break
    except OSError:
        pass
stop.set()
thread.join()
print("DONE")
