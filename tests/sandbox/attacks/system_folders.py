import os

for path in ("/sys", "/dev/mapper", "/dev/shm/..", "/var", "/etc", "/boot", "/proc/1/root"):
    try:
        extra = set(os.listdir(path)) - {"ld.so.cache", "localtime", "alternatives", "passwd", "group"}
        extra -= {"null", "full", "random", "urandom", "fd", "shm", "dev", "etc", "home", "opt", "proc", "tmp", "usr"}
        extra -= {"bin", "lib", "lib32", "lib64", "libx32", "sbin", "root"}
        if extra:
            print("ESCAPED:", path, sorted(extra)[:4])
    except OSError as error:
        print(error)
print("DONE")
