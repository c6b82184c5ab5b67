import os

children = 0
try:
    for _ in range({{CHILDREN}}):
        if os.fork() == 0:
            os._exit(0)
        children += 1
except OSError:
    pass
if children >= {{CHILDREN}}:
    print("ESCAPED:", children, "zombies held")
print("DONE")
