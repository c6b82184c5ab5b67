import os, signal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with open("sparse", "wb") as file:
    try:
        os.truncate(file.fileno(), 10 << 30)
        print("ESCAPED: a file of", os.path.getsize("sparse") >> 30, "GiB")
    except OSError as error:
        print(error)
print("DONE")
