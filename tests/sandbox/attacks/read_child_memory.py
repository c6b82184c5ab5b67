import ctypes, os, signal, time


class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


libc = ctypes.CDLL(None, use_errno=True)
text, copy = ctypes.create_string_buffer(b"known"), ctypes.create_string_buffer(8)
child = os.fork()
if child == 0:
    time.sleep(10)
    os._exit(0)
here, there = Piece(ctypes.addressof(copy), 5), Piece(ctypes.addressof(text), 5)
if libc.process_vm_readv(child, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 5:
    print("ESCAPED:", copy.value)
os.kill(child, signal.SIGKILL)
print("DONE")
