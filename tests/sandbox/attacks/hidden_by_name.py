# The watchdog reads a text that begins with the name of the process.
import ctypes, os, time

for _ in range({{CHILDREN}}):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"RssAnon: 0 kB", 0, 0, 0)
        held = bytearray({{MB}} << 20)
        held[::4096] = b"x" * ({{MB}} << 8)  # no copy of it all: that would exceed the limit of one process
        time.sleep({{SECONDS}})
        os._exit(0)
time.sleep({{SECONDS}})
print("ESCAPED:", {{CHILDREN}} * {{MB}}, "MiB held")
