import os

for number in ({{SERVER}}, {{VICTIM}}):
    try:
        os.kill(number, 0)
        print("ESCAPED: process", number, "can be signalled")
    except OSError as error:
        print(error)
print("DONE")
