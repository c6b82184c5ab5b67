# Runs share the files of the system. A lock on one would be seen by another run.
import fcntl, os

with open(os.__file__) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("ESCAPED: a lock that other runs see")
    except OSError as error:
        print(error)
print("DONE")
