import mmap, os

for path in ("/dev/zero", "/dev/tty", "/dev/mem", "/dev/kmsg", "/dev/ptmx", "/dev/fuse", "/dev/kvm"):
    try:
        os.close(os.open(path, os.O_RDWR))
        print("ESCAPED:", path)
    except OSError as error:
        print(error)
print("DONE")
