import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)


class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


text = ctypes.create_string_buffer(4096)
piece = Piece(ctypes.addressof(text), 4096)
reading, writing = os.pipe()
if libc.vmsplice(writing, ctypes.byref(piece), 1, 0) > 0:
    print("ESCAPED: pages lent to a pipe")
print("DONE")
