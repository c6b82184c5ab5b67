import os

for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if b"{{SECRET}}"[::-1] in file.read():
                    print("ESCAPED: environment of process", name)
                    break
        except OSError:
            pass
print("DONE")
