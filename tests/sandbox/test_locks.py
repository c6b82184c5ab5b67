"""Programs may lock their own files; that they cannot lock others is among the attacks."""

from __future__ import annotations

from spear_sandbox.blocking import BlockingExecutor

OWN_FILES = """
import fcntl, os, sqlite3, subprocess, threading, time

os.mkfifo("pipe")
if os.fork() == 0:
    with open("pipe", "w") as end:
        end.write("through the pipe")
    os._exit(0)
print(open("pipe").read())

with open("own", "w") as first, open("own") as second:
    fcntl.flock(first, fcntl.LOCK_EX)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held")
    if os.fork() == 0:
        time.sleep(0.1)
        fcntl.flock(first, fcntl.LOCK_UN)
        os._exit(0)
    fcntl.flock(second, fcntl.LOCK_EX)  # waits
    print("got")

data = sqlite3.connect("data.db")
data.execute("create table t (x)")
data.execute("insert into t values (42)")
data.commit()
print(sqlite3.connect("data.db").execute("select x from t").fetchone())
done = subprocess.run(["flock", "-n", "own", "echo", "locked by a command"], capture_output=True, text=True)
print(done.stdout.strip() or done.stderr)

thread = threading.Thread(target=time.sleep, args=(0.3,))
thread.start()
with open("own") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        print(error.errno == 37)
thread.join()
try:
    fcntl.flock(99, fcntl.LOCK_SH)
except OSError as error:
    print(error.strerror)
"""


def test_locks_and_pipes_in_the_working_folder(pool: BlockingExecutor) -> None:
    outcome = pool.run(OWN_FILES)
    lines = ["through the pipe", "held", "got", "(42,)", "locked by a command", "True", "Bad file descriptor"]
    assert outcome.stdout.splitlines() == lines, outcome.stderr


def test_asking_the_supervisor_much_does_not_keep_it_from_its_work(pool: BlockingExecutor) -> None:
    code = """
import fcntl, os
file = open("own", "w")
for _ in range(3):
    if os.fork() == 0: break
held = []
while True:
    for _ in range(50): fcntl.flock(file, fcntl.LOCK_SH)
    held.append(bytearray(b"x" * (1 << 20)))
"""
    from spear_sandbox.protocol import KillReason, Limits

    assert pool.run(code, limits=Limits(memory_mb=64, wall_s=15.0)).reason is KillReason.MEMORY
