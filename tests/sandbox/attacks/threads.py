import threading, time

started = []
try:
    for _ in range({{THREADS}}):
        thread = threading.Thread(target=time.sleep, args=(2,), daemon=True)
        thread.start()
        started.append(thread)
except RuntimeError:
    pass
if len(started) >= {{THREADS}}:
    print("ESCAPED:", len(started), "threads")
print("DONE")
