# A process whose first thread has ended shows no memory of its own.
import ctypes, os, threading, time

libc = ctypes.CDLL(None)
for _ in range({{CHILDREN}}):
    if os.fork() == 0:

        def hold():
            time.sleep(0.3)
            held = bytearray({{MB}} << 20)
            held[::4096] = b"x" * ({{MB}} << 8)
            time.sleep({{SECONDS}})
            os._exit(0)

        threading.Thread(target=hold).start()
        libc.syscall({{EXIT}}, 0)
time.sleep(0.3 + {{SECONDS}})
print("ESCAPED:", {{CHILDREN}} * {{MB}}, "MiB held")
