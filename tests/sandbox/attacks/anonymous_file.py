import os

try:
    file = os.memfd_create("hoard")
    os.write(file, bytes(16 << 20))
    print("ESCAPED: a file in memory beyond the folder's bound")
except OSError as error:
    print(error)
print("DONE")
