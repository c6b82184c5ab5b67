import ctypes

libc = ctypes.CDLL(None, use_errno=True)
segment = libc.shmget(0, 1 << 20, 0o1600)
if segment >= 0:
    print("ESCAPED: System V segment", segment)
    libc.shmctl(segment, 0, None)
print("DONE")
