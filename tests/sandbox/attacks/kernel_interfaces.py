import ctypes, os

libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": (298, 425, 321, 253 + 41, 248), "aarch64": (241, 425, 280, 26, 217)}[os.uname().machine]
perf, uring, bpf, inotify, key = numbers
attributes = ctypes.create_string_buffer(120)
ctypes.memmove(attributes, (1).to_bytes(4, "little") + (120).to_bytes(4, "little"), 8)
attempts = {
    "perf_event_open": (perf, attributes, 0, -1, -1, 0),
    "io_uring_setup": (uring, 1, ctypes.create_string_buffer(120)),
    "inotify_init1": (inotify, 0),
    "add_key": (key, b"user", b"sandbox-attack", b"x", 1, -2),
}
for name, arguments in attempts.items():
    if libc.syscall(*arguments) >= 0:
        print("ESCAPED:", name)
print("DONE")
