import os

for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if b"{{COMMAND}}"[::-1] in file.read():
                    print("ESCAPED: command line of process", name)
        except OSError:
            pass
print("DONE")
