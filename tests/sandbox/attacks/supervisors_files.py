import os

target = {{SUPERVISOR}}
for name in ("environ", "mem", "maps", "fd", "cwd", "root"):
    path = f"/proc/{target}/{name}"
    try:
        if name in ("fd", "cwd", "root"):
            found = os.listdir(path)
        else:
            with open(path, "rb") as file:
                found = file.read(1) if name != "mem" else b"open"
        if found:
            print("ESCAPED:", path)
    except OSError as error:
        print(name, error)
for number in range(64):
    try:
        os.close(os.open(f"/proc/{target}/fd/{number}", os.O_WRONLY))
        print("ESCAPED: descriptor", number, "of the supervisor")
    except OSError:
        pass
print("DONE")
