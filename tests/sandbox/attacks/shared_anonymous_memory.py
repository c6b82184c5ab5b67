import mmap

try:
    held = mmap.mmap(-1, 16 << 20)
    held.write(b"x" * (16 << 20))
    print("ESCAPED: memory that outlives its process")
except OSError as error:
    print(error)
print("DONE")
