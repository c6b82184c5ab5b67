import os, sys

for path in {{PATHS}}:
    try:
        os.close(os.open(path, os.O_WRONLY))
        print("ESCAPED: can write", path)
    except OSError as error:
        print(error)
print("DONE")
