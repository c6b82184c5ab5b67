import os

written = 0
try:
    for number in range(3):
        with open(f"hoard{number}", "wb", buffering=0) as file:
            for _ in range(40):
                written += file.write(bytes(1 << 20))
except OSError as error:
    print(error)
if written >= 120 << 20:
    print("ESCAPED:", written >> 20, "MiB of files")
print("DONE")
