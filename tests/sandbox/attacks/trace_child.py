import ctypes, os, signal, time

libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    time.sleep(10)
    os._exit(0)
if libc.ptrace(16, child, None, None) == 0:
    print("ESCAPED: ptrace")
os.kill(child, signal.SIGKILL)
print("DONE")
