import ctypes, os, time

for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        for number in (0, 1, 2):
            os.close(number)
        ctypes.CDLL(None).prctl(15, b"{{TOKEN}}", 0, 0, 0)
        time.sleep({{SECONDS}})
        os._exit(0)
print("DONE")
